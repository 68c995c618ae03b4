"""Writes in place become values, and the results and the inputs afterwards are what they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from ridgefill_compile.errors import CannotFill
from ridgefill_compile.passes.demand import has_effect
from ridgefill_compile.passes.functionalize import functionalize, is_view
from ridgefill_compile.passes.verify import verify
from tests.passes.graphs import aten, named, only, traced

Graph = Callable[..., Any]
B, H, N, D = 2, 3, 5, 4


def real(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


X, CACHE = real(B, H, N, D), real(B, H, 8, D)


def functional(function: Graph, *inputs: Tensor, dynamic: list[tuple[int, int]] | None = None) -> GraphModule:
    """The graph without writes, verified, with equal results and equal inputs afterwards."""
    before = traced(function, *inputs, dynamic=dynamic or [], functional=False)
    after = functionalize(before)
    verify(after, None, "functionalize")
    left, right = ([x.clone() for x in inputs] for _ in range(2))
    torch.testing.assert_close(after(*left), function(*right))
    torch.testing.assert_close(left, right)
    output = after.graph.output_node()
    writes = [n for n in after.graph.nodes if has_effect(n) and "_assert" not in str(n.target)]
    assert all(node.target is aten.copy_.default and node.args[0].op == "placeholder" for node in writes)
    assert all(later.target is aten.copy_.default for node in writes for later in _between(node, output))
    return after


def _between(node: Any, end: Any) -> list[Any]:
    found = []
    while (node := node.next) is not end:
        found.append(node)
    return found


# ---------------------------------------------------------------- writes


def static_cache(x: Tensor, cache: Tensor, at: Tensor) -> tuple[Tensor, ...]:
    """As a static cache is updated, and read."""
    cache.index_copy_(2, at, x)
    return (x @ cache.transpose(-1, -2),)


def filled_buffer(x: Tensor, cache: Tensor, at: Tensor) -> tuple[Tensor, ...]:
    """A buffer of the graph's own."""
    buffer = torch.zeros(B, H, 8, D)
    buffer.index_copy_(2, at, x)
    return buffer, buffer.sum(2)


def added(x: Tensor, cache: Tensor, at: Tensor) -> tuple[Tensor, ...]:
    """Twice, with readers before, between and after."""
    before = cache.sum()
    cache.add_(1.0)
    between = cache.sum()
    cache.mul_(2.0)
    return before, between, cache.sum(), cache * 1


def returned(x: Tensor, cache: Tensor, at: Tensor) -> tuple[Tensor, ...]:
    """The result of the write, and the written value itself."""
    y = x.add_(1.0)
    return y * 2, x * 3


def two_inputs(x: Tensor, cache: Tensor, at: Tensor) -> tuple[Tensor, ...]:
    x.mul_(2.0)
    cache.index_copy_(2, at, x)
    x.add_(1.0)
    return (cache.sum() + x.sum(),)


def copied(x: Tensor, cache: Tensor, at: Tensor) -> tuple[Tensor, ...]:
    """A broadcast write."""
    cache.copy_(x[:, :, :1])
    return (cache.sum(2),)


def put(x: Tensor, cache: Tensor, at: Tensor) -> tuple[Tensor, ...]:
    cache[:, :, at] = x
    return (cache.sum(2),)


def masked(x: Tensor, cache: Tensor, at: Tensor) -> tuple[Tensor, ...]:
    y = x.exp()
    y.masked_fill_(x > 0, 0.0)
    y.clamp_(max=0.5)
    return (y,)


def viewed_later(x: Tensor, cache: Tensor, at: Tensor) -> tuple[Tensor, ...]:
    """A view taken after the write sees it."""
    cache.index_copy_(2, at, x)
    return (cache[:, :, -2:].sum(), cache.transpose(1, 2).sum(1))


def through_an_alias(x: Tensor, cache: Tensor, at: Tensor) -> tuple[Tensor, ...]:
    """`detach` and casts that change nothing are the same memory under another name."""
    cache.detach().add_(1.0)
    x.to(torch.float32).mul_(2.0)
    return cache.sum(), x.sum()


WRITES: list[Graph] = [
    static_cache,
    filled_buffer,
    added,
    returned,
    two_inputs,
    copied,
    put,
    masked,
    viewed_later,
    through_an_alias,
]


@pytest.mark.parametrize("function", WRITES, ids=lambda f: f.__name__)
def test_results_and_inputs_are_what_they_were(function: Graph) -> None:
    at = torch.tensor([1, 0, 3, 7, 4])
    functional(function, X, CACHE, at)
    functional(function, X, CACHE, at, dynamic=[(0, 2), (2, 0)])


def test_one_write_an_input_however_many_there_were() -> None:
    after = functional(added, X, CACHE, torch.arange(5))
    assert len(named(after, aten.copy_.default)) == 1
    after = functional(two_inputs, X, CACHE, torch.arange(5))
    assert [node.args[0] for node in named(after, aten.copy_.default)] == list(after.graph.nodes)[:2]


def test_write_of_a_wider_type_keeps_the_type_of_what_is_written() -> None:
    """`y.add_(x)` rounds to y's type; `y + x` would be of the wider one."""

    def add(x: Tensor) -> tuple[Tensor, ...]:
        y = x.to(torch.bfloat16) * 1
        y.add_(x)
        y.mul_(x)
        return (y,)

    functional(add, X)


# ---------------------------------------------------------------- writes through views


def into_a_slice(x: Tensor) -> tuple[Tensor, ...]:
    x[:, :1].add_(1.0)
    return (x,)


def into_a_slice_set(x: Tensor) -> tuple[Tensor, ...]:
    x[:, 0] = 0.0
    return (x,)


def into_a_transposed(x: Tensor) -> tuple[Tensor, ...]:
    y = x.exp()
    y.transpose(1, 2).mul_(2.0)
    return (y,)


def under_a_view(x: Tensor) -> tuple[Tensor, ...]:
    """A view taken before the write, and read after it."""
    y = x.exp()
    end = y[:, -1:]
    y.add_(1.0)
    return (end,)


def under_a_view_of_a_view(x: Tensor) -> tuple[Tensor, ...]:
    end = x.transpose(1, 2)[:, -1:]
    x.add_(1.0)
    return (end,)


def into_a_piece(x: Tensor) -> tuple[Tensor, ...]:
    first, _ = x.exp().chunk(2, -1)
    first.add_(1.0)
    return (first,)


def into_a_grid(x: Tensor) -> tuple[Tensor, ...]:
    """Views of views, and a reader of every kind: before, between and after."""
    y = x.exp()
    other = y.permute(3, 0, 2, 1)
    before = other.sum()
    y[:, 1:].unsqueeze(0).transpose(-1, -2)[..., ::2, :].mul_(3.0)
    between = other[1:].sum(0) * 1
    other[0].add_(1.0)
    return before, between, y, other.sum(1)


def into_a_reshaped(x: Tensor) -> tuple[Tensor, ...]:
    y = x.exp()
    y.view(-1, D)[-3:].mul_(2.0)
    y.reshape(B, -1).add_(1.0)
    return (y,)


def into_a_copy(x: Tensor) -> tuple[Tensor, ...]:
    """Here `reshape` must copy: the write stays there."""
    y = x.exp()
    z = y.transpose(1, 2).reshape(-1, D)
    z.add_(1.0)
    return y, z


def into_pieces(x: Tensor) -> tuple[Tensor, ...]:
    y = x.exp()
    first, second, third = y.split([1, 2, 1], -1)
    second.mul_(2.0)
    one, other = y.unbind(0)
    one.add_(third.sum())
    return first.sum(), y, other


def into_one_of_several(x: Tensor) -> tuple[Tensor, ...]:
    """A result of `topk` is no view of anything."""
    values, places = x.topk(2, -1)
    values /= values.sum(-1, keepdim=True)
    return values, places, x.sum()


def in_parts(x: Tensor) -> tuple[Tensor, ...]:
    """A buffer filled part by part, as keys that rotate in part are."""
    keys = torch.empty_like(x)
    keys[..., :3].copy_(x[..., 1:])
    keys[..., 3:] = x[..., :1]
    return (keys,)


def written_twice(x: Tensor) -> tuple[Tensor, ...]:
    end = x[:, -1:]
    middle = end[..., 1:]
    x.add_(1.0)
    first = middle * 1
    end.mul_(2.0)
    middle.sub_(1.0)
    return first, middle, end, x * 1


def into_dropout_in_evaluation(x: Tensor) -> tuple[Tensor, ...]:
    """It returns its operand."""
    y = x.exp()
    z = torch.nn.functional.dropout(y, 0.5, training=False)
    z[:, :2] = 0.0
    z.reshape(-1)[:3].add_(1.0)
    return y, z * 1


def into_one_buffer(x: Tensor) -> tuple[Tensor, ...]:
    """Each layer's entry is read after the others were written."""
    buffer = torch.zeros(B, 3)
    for layer in range(3):
        x = x + buffer[:, layer].reshape(B, 1, 1, 1) + x.mean(1, keepdim=True)
        buffer[:, layer] = x[:, -1, -1, -1]
    return x, buffer


THROUGH_VIEWS: list[Graph] = [
    into_one_buffer,
    into_dropout_in_evaluation,
    into_a_slice,
    into_a_slice_set,
    into_a_transposed,
    under_a_view,
    under_a_view_of_a_view,
    into_a_piece,
    into_a_grid,
    into_a_reshaped,
    into_a_copy,
    into_pieces,
    into_one_of_several,
    in_parts,
    written_twice,
]


@pytest.mark.parametrize("function", THROUGH_VIEWS, ids=lambda f: f.__name__)
def test_whatever_looks_at_the_memory_sees_the_write(function: Graph) -> None:
    functional(function, X)
    functional(function, X, dynamic=[(0, 2)])


# ---------------------------------------------------------------- refused


def into_several(x: Tensor) -> tuple[Tensor, ...]:
    torch._foreach_add_([x], 1.0)
    return (x,)


def into_a_diagonal(x: Tensor) -> tuple[Tensor, ...]:
    y = x.exp()
    y.diagonal(0, -2, -1).zero_()
    return (y,)


def into_dropout_of_nothing(x: Tensor) -> tuple[Tensor, ...]:
    """No schema says that it returns its operand."""
    y = x.exp()
    torch.nn.functional.dropout(y, 0.0, training=True).add_(1.0)
    return (y,)


def into_broadcast(x: Tensor) -> tuple[Tensor, ...]:
    y = x.exp()
    torch.broadcast_tensors(y, x)[0].add_(1.0)
    return (y,)


def into_a_split_half(x: Tensor) -> tuple[Tensor, ...]:
    y = x.exp()
    y.hsplit(1)[0].add_(1.0)
    return (y,)


@pytest.mark.parametrize(
    "function",
    [into_several, into_a_diagonal, into_dropout_of_nothing, into_broadcast, into_a_split_half],
    ids=lambda f: f.__name__,
)
def test_writes_that_cannot_be_carried_back_are_refused(function: Graph) -> None:
    before = traced(function, X, functional=False)
    text = before.print_readable(print_output=False)
    with pytest.raises(CannotFill, match="an op writes") as refusal:
        functionalize(before)
    assert refusal.value.node is not None
    assert before.print_readable(print_output=False) == text


# ---------------------------------------------------------------- no-ops


def test_casts_that_change_nothing_are_gone() -> None:
    def casts(x: Tensor) -> tuple[Tensor, ...]:
        y = x.to(torch.float32).detach().type_as(x).float().to(x)
        z = torch.nn.functional.dropout(y.sin(), 0.5, training=False)
        return (z + x.to("cpu"),)

    after = functional(casts, X)
    assert [node.target for node in after.graph.nodes if node.op == "call_function"] == [
        aten.sin.default,
        aten.add.Tensor,
    ]
    assert only(after, aten.sin.default).args[0] is next(iter(after.graph.nodes))


def test_casts_that_change_something_stay() -> None:
    def casts(x: Tensor) -> tuple[Tensor, ...]:
        return x.to(torch.bfloat16).float(), x.to(torch.float32, copy=True), x.double()

    after = functional(casts, X)
    assert len([n for n in after.graph.nodes if n.op == "call_function"]) == 4


def test_copies_are_written_apart() -> None:
    """A copy is another tensor than what it was copied from."""

    def copy(x: Tensor) -> tuple[Tensor, ...]:
        y = x.clone()
        y.add_(1.0)
        return y, x * 1

    functional(copy, X)


def by_dtype(x: Tensor) -> tuple[Tensor, ...]:
    return x.to(torch.float32, copy=True).add_(1.0), x * 1


def by_device(x: Tensor) -> tuple[Tensor, ...]:
    return x.to("cpu", torch.float32, copy=True).add_(1.0), x * 1


def by_example(x: Tensor) -> tuple[Tensor, ...]:
    return x.to(x, copy=True).add_(1.0), x * 1


@pytest.mark.parametrize(
    "function",
    [by_dtype, by_device, by_example],
    ids=lambda f: f.__name__,
)
def test_forced_copies_are_written_apart(function: Graph) -> None:
    """By their schema casts may return a view; their values know better."""
    functional(function, X)


def test_dropout_in_training_stays() -> None:
    module = traced(lambda x: (torch.nn.functional.dropout(x, 0.5),), X)
    assert named(module, aten.dropout.default)


def test_the_old_graph_is_left_alone() -> None:
    before = traced(static_cache, X, CACHE, torch.arange(5), functional=False)
    text = before.print_readable(print_output=False)
    functionalize(before)
    assert before.print_readable(print_output=False) == text


def test_views_are_known() -> None:
    def calls(x: Tensor) -> tuple[Tensor, ...]:
        first, _ = x.split(2, -1)
        return x.transpose(0, 1), x[:, 1:], x.view(-1), x.sin(), torch.cat([x, x]), x.expand(B, H, N, D), first

    module = traced(calls, X)
    found = {node.target for node in module.graph.nodes if is_view(node)}
    assert {aten.transpose.int, aten.slice.Tensor, aten.view.default, aten.expand.default} <= found
    assert not found & {aten.sin.default, aten.cat.default}
