"""Passes broken on purpose: each is caught, with the invariant it breaks and the node; and correct ones are not."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import functional

from ridgefill_compile.passes.eliminate import eliminate
from ridgefill_compile.passes.emit import Emitter, copy_module, fake_mode_of
from ridgefill_compile.passes.verify import BrokenPass, results_of, verify
from tests.passes.graphs import aten, fake, only, traced

B, N, D, V = 2, 7, 4, 11
IDS = torch.arange(B * N).reshape(B, N) % V
TABLE, W = torch.randn(V, D), torch.randn(3 * D, D)

Pass = Callable[[GraphModule], GraphModule]


def model(ids: Tensor, table: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """A layer's output and state writes."""
    q, k, v = functional.linear(functional.embedding(ids, table), w).split(D, -1)
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y[:, -2:].sin(), k * 2, v * 3


def graph(rows: int = N, dynamic: bool = False) -> GraphModule:
    ids = torch.arange(B * rows).reshape(B, rows) % V
    return traced(model, ids, TABLE, W, dynamic=[(0, 1)] if dynamic else [])


def emitter(module: GraphModule) -> Emitter:
    return Emitter(module.graph, fake_mode_of(module.graph))


def return_instead(module: GraphModule, position: int, change: Callable[[Emitter, Node], Node]) -> None:
    """Put another value in place of a result."""
    output = module.graph.output_node()
    results = list(results_of(module))
    with module.graph.inserting_before(output):
        results[position] = change(emitter(module), results[position])
    output.args = (tuple(results),)


def add_constant(module: GraphModule, name: str, value: Tensor, place: Node) -> Node:
    """A tensor kept in the graph, before another node."""
    module.register_buffer(name, value)
    with module.graph.inserting_before(place):
        node = module.graph.create_node("get_attr", name)
    node.meta["val"] = fake(fake_mode_of(module.graph), value, name)
    return node


# ---------------------------------------------------------------- broken


def other_type(module: GraphModule) -> GraphModule:
    return_instead(module, 1, lambda emit, old: emit(aten.to.dtype, old, torch.bfloat16))
    return module


def other_shape(module: GraphModule) -> GraphModule:
    return_instead(module, 1, lambda emit, old: emit(aten.slice.Tensor, old, 1, 1, 2**63 - 1))
    return module


def type_not_as_claimed(module: GraphModule) -> GraphModule:
    node = only(module, aten.sin.default)
    with fake_mode_of(module.graph):
        node.meta["val"] = node.meta["val"].to(torch.float64)
    return module


def shape_not_as_claimed(module: GraphModule) -> GraphModule:
    node = only(module, aten.embedding.default)
    with fake_mode_of(module.graph):
        node.meta["val"] = node.meta["val"][:, 1:]
    return module


def shape_changed_behind_the_claim(module: GraphModule) -> GraphModule:
    """Narrowed by an edit of its arguments, its metadata forgotten."""
    piece = only(module, aten.slice.Tensor)
    piece.update_arg(2, -1)
    return module


def no_value(module: GraphModule) -> GraphModule:
    del only(module, aten.sin.default).meta["val"]
    return module


def does_not_run(module: GraphModule) -> GraphModule:
    only(module, aten.linear.default).update_arg(1, next(iter(module.graph.nodes)))
    return module


def result_twice(module: GraphModule) -> GraphModule:
    return_instead(module, 2, lambda emit, old: results_of(module)[1])
    return module


def results_in_one_buffer(module: GraphModule) -> GraphModule:
    """Keys and values as two views of one tensor."""
    output = module.graph.output_node()
    first, keys, values = results_of(module)
    emit = emitter(module)
    with module.graph.inserting_before(output):
        both = emit(aten.cat.default, [keys, values], -1)
        pieces = emit(aten.split.Tensor, both, D, -1)
        output.args = ((first, *(emit(operator.getitem, pieces, i) for i in (0, 1))),)
    return module


def input_dropped(module: GraphModule) -> GraphModule:
    table = list(module.graph.nodes)[1]
    constant = add_constant(module, "table", TABLE, table.next)
    table.replace_all_uses_with(constant)
    module.graph.erase_node(table)
    return module


def inputs_swapped(module: GraphModule) -> GraphModule:
    ids, table, *_ = module.graph.nodes
    table.append(ids)
    return module


def result_dropped(module: GraphModule) -> GraphModule:
    output = module.graph.output_node()
    output.args = (tuple(results_of(module)[:-1]),)
    return module


def used_before_defined(module: GraphModule) -> GraphModule:
    only(module, aten.embedding.default).prepend(only(module, aten.linear.default))
    return module


def constant_of_the_prompt(module: GraphModule) -> GraphModule:
    """A mask made for this length, kept in the graph."""
    mask = add_constant(module, "mask", torch.ones(N, 1), only(module, aten.embedding.default))
    return_instead(module, 1, lambda emit, old: emit(aten.mul.Tensor, old, mask))
    return module


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (other_type, r"a result was torch.float32\[2, 7, 4\] before: node .*bfloat16"),
        (other_shape, r"a result was torch.float32\[2, 7, 4\] before: node slice"),
        (type_not_as_claimed, r"a call gives torch.float32.*, its metadata says torch.float64.*node sin"),
        (shape_not_as_claimed, r"a call gives .*\[2, 7, 4\], its metadata says .*\[2, 6, 4\]: node embedding"),
        (shape_changed_behind_the_claim, r"a call gives .*\[2, 1, 4\], its metadata says .*\[2, 2, 4\]: node slice"),
        (no_value, "a call has no fake value: node sin"),
        (does_not_run, "a call cannot run: node linear"),
        (result_twice, "results 1 and 2 now share memory"),
        (results_in_one_buffer, "results 1 and 2 now share memory: node getitem"),
        (input_dropped, "the graph's inputs changed"),
        (inputs_swapped, "the graph's inputs changed"),
        (result_dropped, "the graph returns 2 values, and 3 before"),
        (used_before_defined, "the graph is not well formed"),
        (constant_of_the_prompt, "a constant has as many entries as the prompt has rows: node mask"),
    ],
)
def test_broken_pass_is_caught(broken: Pass, message: str) -> None:
    before = graph()
    with pytest.raises(BrokenPass, match=f"^planted: .*{message}"):
        verify(broken(copy_module(before)), before, "planted")


@pytest.mark.parametrize("broken", [type_not_as_claimed, shape_changed_behind_the_claim, does_not_run])
def test_what_was_found_right_is_no_excuse_for_what_is_broken(broken: Pass) -> None:
    """Nor is a graph that was never checked, or that was changed since."""
    before = graph()
    verify(before)
    with pytest.raises(BrokenPass, match="planted"):
        verify(broken(copy_module(before)), before, "planted")
    never_checked = broken(graph())
    with pytest.raises(BrokenPass, match="planted"):
        verify(copy_module(never_checked), never_checked, "planted")
    broken(before)
    for after in (before, copy_module(before)):
        with pytest.raises(BrokenPass, match="planted"):
            verify(after, before, "planted")


def test_calls_that_were_found_right_are_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Node] = []

    def value_of(self: Emitter, node: Node) -> Any:
        ran.append(node)
        return run(self, node)

    run = Emitter.value_of
    monkeypatch.setattr(Emitter, "value_of", value_of)
    before = graph()
    verify(before)
    assert len(ran) > 5
    after = added_result(copy_module(before))
    ran.clear()
    verify(after, before)
    assert [node.target for node in ran] == [aten.sum.default]


def length_of_this_prompt(module: GraphModule) -> GraphModule:
    """A plain number where the length is a symbol."""
    return_instead(module, 1, lambda emit, old: emit(aten.slice.Tensor, old, 1, 0, N))
    return module


@pytest.mark.parametrize(
    "broken",
    [
        length_of_this_prompt,
        other_type,
        other_shape,
        results_in_one_buffer,
        constant_of_the_prompt,
    ],
    ids=lambda f: f.__name__,
)
def test_broken_pass_is_caught_on_symbolic_sizes(broken: Pass) -> None:
    before = graph(dynamic=True)
    with pytest.raises(BrokenPass):
        verify(broken(copy_module(before)), before, "planted")


# ---------------------------------------------------------------- correct


def added_result(module: GraphModule) -> GraphModule:
    """As accumulators are."""
    output = module.graph.output_node()
    with module.graph.inserting_before(output):
        more = emitter(module)(aten.sum.default, results_of(module)[1])
    output.args = ((*results_of(module), more),)
    return module


def map_of_equal_width(module: GraphModule) -> GraphModule:
    """A constant of this package's own: its width may happen to be the prompt's length."""
    add_constant(module, "ridgefill_offset_1", torch.ones(N, 1), only(module, aten.embedding.default))
    return module


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("good", [copy_module, eliminate, added_result, map_of_equal_width], ids=lambda f: f.__name__)
def test_correct_pass_is_not_flagged(good: Pass, dynamic: bool) -> None:
    before = graph(dynamic=dynamic)
    verify(before)
    verify(good(copy_module(before)), before, "correct")


def test_results_that_shared_memory_before_may_share_it() -> None:
    def views(x: Tensor) -> tuple[Tensor, ...]:
        h = x.sin()
        return h[:, :2], h[:, 2:], h

    before = traced(views, torch.randn(B, N))
    verify(before)
    verify(copy_module(before), before)


def test_assertions_are_not_flagged() -> None:
    def check(x: Tensor) -> tuple[Tensor, ...]:
        torch._assert_async((x < 10).all(), "too large")
        return (x.sin(),)

    verify(traced(check, torch.randn(B, N)))


def test_verifying_changes_nothing() -> None:
    before = graph(dynamic=True)
    after = eliminate(before)
    texts = [m.print_readable(print_output=False) for m in (before, after)]
    mode = fake_mode_of(before.graph)
    assert mode.shape_env is not None
    guards = len(mode.shape_env.guards)
    verify(after, before)
    assert [m.print_readable(print_output=False) for m in (before, after)] == texts
    assert len(mode.shape_env.guards) == guards
