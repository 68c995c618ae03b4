"""Forms for Inductor: the same values, convolutions written out and tables computed once."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import functional

from ridgefill_compile.passes.lower import lower
from ridgefill_compile.passes.verify import verify
from tests.passes.graphs import aten, named, traced

B, C, N = 2, 6, 11
Graph = Callable[..., tuple[Tensor, ...]]
once = torch.ops.ridgefill.computed_once.default


def real(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


def lowered(function: Graph, *inputs: Tensor, dynamic: Collection[tuple[int, int]] = ()) -> GraphModule:
    """The lowered graph, verified, and equal on the inputs it was traced with."""
    before = traced(function, *inputs, dynamic=dynamic)
    after = lower(before)
    verify(after, before, "lower")
    expected = before(*inputs)
    torch.testing.assert_close(after(*inputs), expected, rtol=1e-5, atol=1e-5)
    assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(after(*inputs), expected, strict=True))
    return after


# ---------------------------------------------------------------- convolutions


@given(taps=st.integers(1, 5), padding=st.integers(0, 5), dilation=st.integers(1, 3), bias=st.booleans())
def test_a_convolution_of_one_channel_each_is_a_sum_of_shifted_products(
    taps: int, padding: int, dilation: int, bias: bool
) -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        y = functional.conv1d(x, w, b if bias else None, 1, padding, dilation, C)
        return y, functional.silu(y[..., :4])

    inputs = (real(B, C, N + dilation * taps), real(C, 1, taps), real(C))
    after = lowered(function, *inputs)
    assert not named(after, aten.conv1d.default)
    assert len(named(after, aten.mul.Tensor)) == taps


def causal(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    rows = x.shape[-1]
    return (functional.conv1d(x, w, None, 1, 3, 1, C)[..., :rows].sin(),)


def test_any_number_of_rows() -> None:
    before = traced(causal, real(B, C, N), real(C, 1, 4), dynamic=[(0, 0), (0, 2)])
    after = lower(before)
    for batch, rows in ((2, 11), (1, 5), (3, 1)):
        x, w = real(batch, C, rows), real(C, 1, 4)
        torch.testing.assert_close(after(x, w), causal(x, w), rtol=1e-5, atol=1e-5)


def test_in_bfloat16_as_exact_as_the_librarys() -> None:
    x, w = real(B, C, N).bfloat16(), real(C, 1, 4).bfloat16()
    compiled = torch.compile(lower(traced(causal, x, w)))
    true = causal(x.double(), w.double())[0]
    assert (compiled(x, w)[0] - true).abs().max() <= 1.5 * (causal(x, w)[0] - true).abs().max() + 1e-3


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: functional.conv1d(x, w, None, 2, 0, 1, C),
        lambda x, w: functional.conv1d(x, w.expand(-1, 3, -1), None, 1, 0, 1, 2),
        lambda x, w: functional.conv1d(x, w.repeat(2, 1, 1), None, 1, 0, 1, C),
        lambda x, w: functional.conv1d(x, w, None, 1, "same", 1, C),
        lambda x, w: functional.conv1d(x[0], w, None, 1, 0, 1, C),
        lambda x, w: functional.conv1d(x, w, None, 1, x.shape[2] // 2, 1, C),
    ],
    ids=["strided", "grouped", "two each", "padding by name", "without batch", "padding by rows"],
)
def test_other_convolutions_are_left_as_they_are(call: Callable[[Tensor, Tensor], Tensor]) -> None:
    after = lowered(lambda x, w: (call(x, w).sin(),), real(B, C, N), real(C, 1, 4), dynamic=[(0, 2)])
    assert [n for n in after.graph.nodes if "conv1d" in str(n.target)]


# ---------------------------------------------------------------- tables


def angles(positions: Tensor, frequencies: Tensor) -> Tensor:
    return positions[:, :, None].float() * frequencies


def rotary(positions: Tensor, frequencies: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Cosines of positions, read by two layers."""
    table = angles(positions, frequencies).cos() * 1.0
    hidden = x @ w
    return (hidden * table).sin(), (hidden[:, -3:] * table[:, -3:]).tanh()


INPUTS: tuple[Any, ...] = (torch.arange(N)[None], real(C), real(B, N, C), real(C, C))


def test_a_table_of_positions_is_computed_once() -> None:
    after = lowered(rotary, *INPUTS)
    assert len(named(after, once)) == 1


def test_a_table_read_once_is_left_to_be_fused() -> None:
    def function(*given: Tensor) -> tuple[Tensor, ...]:
        positions, frequencies, x, w = given
        return ((x @ w) * angles(positions, frequencies).cos(),)

    assert not named(lowered(function, *INPUTS), once)


def test_cosines_of_tokens_are_no_table() -> None:
    def function(*given: Tensor) -> tuple[Tensor, ...]:
        _, _, x, w = given
        table = (x @ w).cos()
        return table * x, table.exp() * x

    assert not named(lowered(function, *INPUTS), once)


def test_a_table_that_is_also_a_result() -> None:
    def function(*given: Tensor) -> tuple[Tensor, ...]:
        positions, frequencies, x, w = given
        table = angles(positions, frequencies).sin()
        hidden = x @ w
        return table, hidden * table, hidden.exp() * table

    assert len(named(lowered(function, *INPUTS), once)) == 1


def test_an_input_that_is_written_is_no_table() -> None:
    def function(scale: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        positions, frequencies, x, w = given
        table = angles(positions, frequencies).cos()
        spread, hidden = scale.expand_as(table), x @ w
        results = hidden * spread, hidden + spread, hidden * table
        scale.mul_(2.0)
        return results

    before = traced(function, torch.ones(1), *INPUTS)
    after = lower(before)
    scale = torch.ones(1)
    after(scale, *INPUTS)
    assert scale.item() == 2.0


def test_a_table_of_as_many_positions_as_there_are_rows() -> None:
    def function(*given: Tensor) -> tuple[Tensor, ...]:
        _, frequencies, x, w = given
        table = angles(torch.arange(x.shape[1])[None], frequencies).sin()
        hidden = x @ w
        return hidden * table, hidden.exp() * table

    assert len(named(lowered(function, *INPUTS, dynamic=[(2, 1)]), once)) == 1
