"""Forms for Inductor: the same values, convolutions written out."""

from __future__ import annotations

from collections.abc import Callable, Collection

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
