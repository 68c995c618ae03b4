"""Eliminated graphs compute what they did, on fewer rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import functional

from ridgefill_compile.cost import multiply_adds
from ridgefill_compile.passes.calls import shape
from ridgefill_compile.passes.eliminate import eliminate
from ridgefill_compile.passes.emit import inputs_of
from ridgefill_compile.passes.verify import verify
from tests.passes.graphs import aten, named, only, traced

B, N, D = 2, 6, 4
T = 2
Graph = Callable[..., tuple[Tensor, ...]]


def real(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


X, W = real(B, N, D), 0.5 * real(3 * D, D)


def eliminated(
    function: Graph, *inputs: Tensor, dynamic: Collection[tuple[int, int]] = ()
) -> tuple[GraphModule, GraphModule]:
    """A graph before and after, verified, and equal on the inputs it was traced with."""
    before = traced(function, *inputs, dynamic=dynamic)
    after = eliminate(before)
    verify(after, before, "eliminate")
    agree(before, after, inputs)
    return before, after


def agree(before: GraphModule, after: GraphModule, inputs: Sequence[Any]) -> None:
    """Same results, and same inputs afterwards."""
    left, right = ([x.clone() for x in inputs] for _ in range(2))
    torch.testing.assert_close(after(*left), before(*right), rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


def size(module: GraphModule, target: Any) -> list[Any]:
    """Shape that the one call of an op computes."""
    return list(shape(only(module, target)))


# ---------------------------------------------------------------- graphs


def chain(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (functional.linear(functional.layer_norm(x, [D]), w).sin()[:, -T:],)


def joint(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """What a fill looks like: predictions before, exact rows behind; keys read all of it, queries the end."""
    merged = torch.cat([x[:, :-T].cos(), x[:, -T:].exp()], 1)
    return functional.linear(merged, w).tan(), merged.sin()[:, -T:]


def split_heads(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    q, k, v = functional.linear(x, w).split(D, -1)
    return q[:, -T:].sin(), k.cos(), v[:, -T - 1 :].exp()


def narrow_heads(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    q, k, v = functional.linear(x, w).chunk(3, -1)
    return q[:, -1:].sin(), k[:, -T:].cos(), v[:, -T - 1 :].exp()


def best(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    values, indices = functional.linear(x, w).sort(-1)
    return values[:, -T:].sin(), indices[:, -T - 1 :] * 2, values.topk(3)[0][:, -1:]


def pieces_of_rows(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """What is cut is the rows: the call runs whole, and its pieces are sliced."""
    first, second = functional.linear(x, w).split([N - 2, 2], 1)
    return first.sin()[:, -1:], second.cos()[:, -1:]


def two_readers(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    h = functional.linear(x, w)
    return h.sin()[:, -1:], h.cos()[:, -3:], h[:, -2:].exp()


def crossed_readers(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    h = functional.linear(x, w)
    return h.sin()[:, -T:], h.cos()[..., -T:]


def blocked(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (functional.linear(functional.linear(x, w).cumsum(1).sin()[:, -T:], w.t()),)


def flattened(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """An MLP on [batch * rows, d], as some write it."""
    flat = torch.addmm(w[0, 0], x.reshape(-1, D), w.t()).relu()
    return ((flat @ w).view(x.shape)[:, -T:],)


def view_of_a_slice(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The value is also read whole, so its rows are cut out of it, and those are not contiguous."""
    h = functional.linear(x, w)
    return h.cos(), (h.view(-1, 3 * D).sin() @ w).view(x.shape)[:, -T:]


def blocks_and_rows(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The last row of each sample, and the last row of all."""
    h = functional.linear(x.reshape(-1, D), w)
    return h.view(x.shape[0], -1, 3 * D).sin()[:, -1:], h[-1:].cos()


def repeated_heads(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    batch, rows, _ = x.shape
    q, k, v = functional.linear(x, w).view(batch, rows, 3, D).unbind(2)
    q = q.view(batch, rows, 2, D // 2).transpose(1, 2)
    k, v = (t[:, None, :, : D // 2].expand(batch, 2, rows, D // 2) for t in (k, v))
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2).reshape(batch, rows, D)[:, -T:], k[:, 0], v[:, 0]


def spelt_attention(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    rows = x.shape[1]
    q, k, v = functional.linear(x, w).split(D, -1)
    seen = torch.arange(rows)[:, None] >= torch.arange(rows)
    scores = (q @ k.transpose(1, 2) * 0.5).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ v)[:, -T:], k, v


def two_layers(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Both layers' keys are wanted, and the logits of the end."""
    states = []
    for _ in range(2):
        q, k, v = functional.linear(functional.rms_norm(x, [D]), w).split(D, -1)
        states += [k, v]
        x = x + functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + functional.linear(functional.gelu(functional.linear(x, w)), w.t())
    return functional.linear(x[:, -T:], w), *states


def past_and_new(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """A continued cache: old keys stand before the prompt's."""
    q, k, v = functional.linear(x, w).split(D, -1)
    old = x.detach()[:, :3].exp()
    keys, values = torch.cat([old, k], 1), torch.cat([old, v], 1)
    total = keys.shape[1]
    seen = torch.arange(total) <= torch.arange(total - q.shape[1], total)[:, None]
    return functional.scaled_dot_product_attention(q, keys, values, seen)[:, -T:], keys, values


def positions(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Tables looked up by position, constants spread over rows."""
    rows = x.shape[1]
    at = torch.arange(rows)
    table = w[:, :1] * w[:, 1]
    turned = x * functional.embedding(at % 3, w).cos() + torch.ones(rows, 1) * table[at % 3, :D]
    return (turned[:, -T:],)


GRAPHS: list[Any] = [
    chain,
    joint,
    split_heads,
    narrow_heads,
    best,
    two_readers,
    crossed_readers,
    blocked,
    flattened,
    view_of_a_slice,
    blocks_and_rows,
    repeated_heads,
    spelt_attention,
    two_layers,
    past_and_new,
    positions,
]


@pytest.mark.parametrize("function", [*GRAPHS, pieces_of_rows], ids=lambda f: f.__name__)
def test_results_are_what_they_were(function: Graph) -> None:
    eliminated(function, X, W)
    eliminated(function, real(B, N, 2 * D)[..., ::2], W)  # not contiguous
    eliminated(function, real(1, N, D), W)


@pytest.mark.parametrize("function", GRAPHS, ids=lambda f: f.__name__)
def test_any_number_of_rows(function: Graph) -> None:
    before, after = eliminated(function, real(B, 7, D), W, dynamic=[(0, 1)])
    for rows in (4, 9, 12):
        agree(before, after, [real(B, rows, D), W])


@pytest.mark.parametrize("function", GRAPHS, ids=lambda f: f.__name__)
def test_any_number_of_samples(function: Graph) -> None:
    before, after = eliminated(function, real(5, 7, D), W, dynamic=[(0, 0), (0, 1)])
    for batch, rows in ((2, 7), (3, 4), (6, 6)):
        agree(before, after, [real(batch, rows, D), W])


# ---------------------------------------------------------------- what is computed


def test_values_are_computed_on_the_rows_that_are_read() -> None:
    _, after = eliminated(chain, X, W)
    for target in (aten.layer_norm.default, aten.linear.default, aten.sin.default):
        assert shape(only(after, target))[:2] == (B, T)
    _, after = eliminated(two_readers, X, W)
    assert size(after, aten.linear.default) == [B, 3, 3 * D]
    assert size(after, aten.sin.default) == [B, 1, 3 * D]
    assert size(after, aten.exp.default) == [B, 2, 3 * D]


def test_rows_of_a_joint_come_from_its_last_part() -> None:
    _, after = eliminated(joint, X, W)
    assert size(after, aten.sin.default) == [B, T, D]
    (source,) = only(after, aten.sin.default).all_input_nodes
    assert source is only(after, aten.exp.default), "not cut out of the joint"


def test_joint_that_nobody_reads_in_full_is_gone() -> None:
    def ends(x: Tensor) -> tuple[Tensor, ...]:
        merged = torch.cat([x[:, :-T].cos(), x[:, -T:].exp()], 1)
        return merged[:, -1:].sin(), merged.tan()[:, -T:]

    _, after = eliminated(ends, X)
    assert not named(after, aten.cat.default)
    assert not named(after, aten.cos.default)
    assert size(after, aten.sin.default) == [B, 1, D]


def test_results_of_one_call_narrowed_differently() -> None:
    _, after = eliminated(narrow_heads, X, W)
    assert size(after, aten.linear.default) == [B, T + 1, 3 * D]
    assert size(after, aten.sin.default) == [B, 1, D]
    assert size(after, aten.cos.default) == [B, T, D]
    _, after = eliminated(split_heads, X, W)
    assert size(after, aten.linear.default) == [B, N, 3 * D]
    assert size(after, aten.sin.default) == [B, T, D]


def test_op_without_a_rule_runs_whole_and_is_sliced() -> None:
    _, after = eliminated(blocked, X, W)
    assert size(after, aten.cumsum.default) == [B, N, 3 * D]
    assert size(after, aten.sin.default) == [B, T, 3 * D]
    assert [list(shape(node)) for node in named(after, aten.linear.default)] == [[B, N, 3 * D], [B, T, D]]


def test_flattened_batch_is_narrowed_per_sample() -> None:
    _, after = eliminated(flattened, X, W)
    assert size(after, aten.addmm.default) == [B * T, 3 * D]
    _, after = eliminated(view_of_a_slice, X, W)
    assert size(after, aten.sin.default) == [B * T, 3 * D]


def test_rows_are_cut_once_for_all_readers() -> None:
    def readers(x: Tensor) -> tuple[Tensor, ...]:
        h = x.sin()
        return h, h.cos()[:, -T:], h.exp()[:, -T:], h.tan()[:, -1:]

    _, after = eliminated(readers, X)
    assert len(named(after, aten.slice.Tensor)) == 2


def test_dead_code_goes_and_inputs_stay() -> None:
    def some(x: Tensor, unused: Tensor) -> tuple[Tensor, ...]:
        x.cos().tan()
        return (x.sin(),)

    before = traced(some, X, W, functional=False)
    after = eliminate(before)
    verify(after, before, "eliminate")
    assert not named(after, aten.cos.default)
    assert len(inputs_of(after.graph)) == 2
    agree(before, after, [X, W])


def test_effects_stay() -> None:
    def write(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        cache.index_copy_(1, torch.arange(x.shape[1]), x.sin())
        return x.sin()[:, -T:].cos(), cache[:, :1].exp()

    _, after = eliminated(write, X, real(B, 2 * N, D))
    assert named(after, aten.copy_.default)
    assert size(after, aten.cos.default) == [B, T, D]


def test_assertions_stay() -> None:
    def check(x: Tensor) -> tuple[Tensor, ...]:
        torch._assert_async((x.sin() < 0.5).all(), "too large")
        return (x.sin()[:, -T:].cos(),)

    after = eliminate(traced(check, X))
    after(torch.zeros(B, N, D))
    with pytest.raises(RuntimeError, match="too large"):
        after(torch.ones(B, N, D))


def test_the_old_graph_is_left_alone() -> None:
    before = traced(two_layers, X, W)
    text = before.print_readable(print_output=False)
    eliminate(before)
    assert before.print_readable(print_output=False) == text


def test_eliminating_twice_changes_nothing() -> None:
    before, after = eliminated(two_layers, X, W)
    again = eliminate(after)
    assert [node.target for node in again.graph.nodes] == [node.target for node in after.graph.nodes]
    assert multiply_adds(again.graph) == multiply_adds(after.graph)
    agree(before, again, [X, W])


def test_multiply_adds_by_hand() -> None:
    """Two layers: the first one's keys and values read all rows, so its projection and everything before the second
    layer's keys do; of the second layer's attention, MLP and of the logits only the last T rows are read.
    """
    before, after = eliminated(two_layers, X, W)
    projection, mlp, logits = 3 * D * D, 2 * 3 * D * D, 3 * D * D
    pairs, tail_pairs = N * (N + 1) // 2, sum(range(N - T + 1, N + 1))
    exact = B * (2 * (N * projection + pairs * 2 * D + N * mlp) + T * logits)
    # q, k and v come from one product, so the second layer's q is computed on all rows, too
    filled = B * (N * projection + pairs * 2 * D + N * mlp + N * projection + tail_pairs * 2 * D + T * (mlp + logits))
    assert multiply_adds(before.graph) == exact
    assert multiply_adds(after.graph) == filled


def test_multiply_adds_of_any_number_of_rows() -> None:
    _, after = eliminated(two_layers, real(B, 7, D), W, dynamic=[(0, 1)])
    formula = multiply_adds(after.graph)
    (symbol,) = formula.free_symbols
    for rows in (4, 7, 1000):
        _, static = eliminated(two_layers, real(B, rows, D), W) if rows < 50 else (None, None)
        pairs, tail_pairs = rows * (rows + 1) // 2, T * rows - T * (T - 1) // 2
        shared = 2 * rows * 3 * D * D + pairs * 2 * D + rows * 6 * D * D
        expected = B * (shared + tail_pairs * 2 * D + T * 9 * D * D)
        assert formula.subs(symbol, rows) == expected
        if static is not None:
            assert multiply_adds(static.graph) == sympy.Integer(expected)


def test_causal_mask_is_made_once() -> None:
    """Two late attentions share one mask of the tail."""

    def tails(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        q, k, v = functional.linear(x, w).split(D, -1)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        z = functional.scaled_dot_product_attention(y + q, k, v, is_causal=True)
        return z[:, -T:], k, v

    for dynamic in ([], [(0, 1)]):
        before, after = eliminated(tails, X, W, dynamic=dynamic)
        assert len(named(after, aten.where.self)) == 1
        calls = named(after, aten.scaled_dot_product_attention.default)
        assert [shape(call)[1] for call in calls] == [T, T]
        assert all(call.args[5] is False for call in calls)
        assert len(named(before, aten.where.self)) == 0


def test_a_result_that_borrows_an_input_does_not_see_later_writes() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        last = torch.cat([w[:1].expand(B, 1, D), x], 1)[:, -T:]
        x.mul_(0.0)
        return (last,)

    eliminated(function, X.clone(), W)
