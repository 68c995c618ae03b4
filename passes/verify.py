"""What must hold after every pass. Raises on the first thing that does not.

1. The graph is well formed, and every value is defined before it is read.
2. Every call, run on its operands' fake values, gives the shape, dtype and device its `meta["val"]` claims. One on the
   very same values that was found right in this graph, or in the one before, is not run again.
3. The results have the shapes and dtypes they had before the pass; the inputs are the same.
4. No two results, and no result and input, share memory that did not before.
5. No constant tensor has a dimension of as many entries as the prompt has rows, and no call adds a guard on sizes: the
   graph would hold for one length only.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from ridgefill_compile.errors import RidgefillError, describe_node
from ridgefill_compile.passes.calls import shape
from ridgefill_compile.passes.emit import Emitter, fake_mode_of, inputs_of
from ridgefill_compile.passes.functionalize import memory_of
from ridgefill_compile.passes.rows import IntLike, same

# Calls that were found right, with their fake values, which so keep their identity.
_right: weakref.WeakKeyDictionary[GraphModule, dict[tuple[Any, ...], list[Any]]] = weakref.WeakKeyDictionary()


class BrokenPass(RidgefillError):
    """A pass left a graph that breaks an invariant: a bug in this package, never in the user's model."""


def verify(after: GraphModule, before: GraphModule | None = None, name: str = "pass") -> None:
    """Check a pass's result, against the graph it was given where there is one.

    Raises:
        BrokenPass: naming the pass, the invariant and the node.
    """
    try:
        after.graph.lint()
    except RuntimeError as error:
        raise BrokenPass(f"{name}: the graph is not well formed: {error}") from error
    _check_values(after, name, {**_right.get(after, {}), **({} if before is None else _right.get(before, {}))})
    _right[after] = {_call(node): _values_of(node) for node in after.graph.nodes if node.op == "call_function"}
    if before is not None:
        _check_signature(after, before, name)
        _check_aliases(after, before, name)
        _check_constants(after, before, name)


def _fail(name: str, what: str, node: Node) -> None:
    raise BrokenPass(f"{name}: {what}: {describe_node(node)}")


def _values_of(node: Node) -> list[Any]:
    return [node.meta.get("val"), *(operand.meta.get("val") for operand in node.all_input_nodes)]


def _call(node: Node) -> tuple[Any, ...]:
    """What a node calls, with which fake values, and what it claims to give: equal for equal calls."""
    arguments = map_arg((node.args, node.kwargs), lambda operand: f"value {id(operand.meta.get('val'))}")
    return (node.target, repr(arguments), id(node.meta.get("val")))


def _check_values(module: GraphModule, name: str, checked: Mapping[tuple[Any, ...], Any]) -> None:
    emit = Emitter(module.graph, fake_mode_of(module.graph))
    guards = len(emit.guards())
    for node in module.graph.nodes:
        if node.op != "call_function" or ("val" in node.meta and _call(node) in checked):
            continue
        if hasattr(node.target, "_schema") and not node.target._schema.returns:
            continue  # an assertion: it has an effect and no value
        if "val" not in node.meta:
            _fail(name, "a call has no fake value", node)
        if isinstance(node.meta["val"], torch.SymFloat | torch.SymInt | torch.SymBool):
            continue  # a number, not a value: `item()` of a fake tensor would make a new symbol
        try:
            value = emit.value_of(node)
        except Exception as error:
            raise BrokenPass(f"{name}: a call cannot run: {describe_node(node)}: {error}") from error
        if len(emit.guards()) > guards:
            _fail(name, f"a call holds for some lengths only, it adds the guard {emit.guards()[-1].expr}", node)
        claimed, found = tree_leaves(node.meta["val"]), tree_leaves(value)
        if len(claimed) != len(found) or not all(map(_agree, claimed, found)):
            _fail(name, f"a call gives {_kinds(found)}, its metadata says {_kinds(claimed)}", node)


def _agree(left: Any, right: Any) -> bool:
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return isinstance(left, torch.Tensor) == isinstance(right, torch.Tensor)
    alike = left.dtype == right.dtype and left.device == right.device and left.dim() == right.dim()
    return alike and all(map(_same_or_counted, left.shape, right.shape))


def _same_or_counted(left: IntLike, right: IntLike) -> bool:
    """Whether two sizes agree. How many entries data choose is a new symbol at every run."""
    return same(left, right) or bool(free_unbacked_symbols(left) and free_unbacked_symbols(right))


def _kinds(values: list[Any]) -> str:
    return ", ".join(f"{v.dtype}{list(v.shape)}" if isinstance(v, torch.Tensor) else str(v) for v in values)


def results_of(module: GraphModule) -> list[Node]:
    """The nodes a graph returns, in order."""
    leaves = tree_leaves(module.graph.output_node().args[0])
    return [leaf for leaf in leaves if isinstance(leaf, Node)]


def _check_signature(after: GraphModule, before: GraphModule, name: str) -> None:
    new_inputs, old_inputs = inputs_of(after.graph), inputs_of(before.graph)
    if [n.target for n in new_inputs][: len(old_inputs)] != [n.target for n in old_inputs]:
        raise BrokenPass(f"{name}: the graph's inputs changed")
    new, old = results_of(after), results_of(before)
    if len(new) < len(old):
        raise BrokenPass(f"{name}: the graph returns {len(new)} values, and {len(old)} before")
    for left, right in zip(new, old, strict=False):
        if not all(map(_agree, tree_leaves(left.meta.get("val")), tree_leaves(right.meta.get("val")))):
            _fail(name, f"a result was {_kinds(tree_leaves(right.meta.get('val')))} before", left)


def _check_aliases(after: GraphModule, before: GraphModule, name: str) -> None:
    new, old = results_of(after), results_of(before)
    for i, value in enumerate(old):
        if memory_of(new[i]).op == "placeholder" and memory_of(value).op != "placeholder":
            _fail(name, f"result {i} now shares memory with an input", new[i])
    for i, j in combinations(range(len(old)), 2):
        if memory_of(new[i]) is memory_of(new[j]) and memory_of(old[i]) is not memory_of(old[j]):
            _fail(name, f"results {i} and {j} now share memory", new[i])


def _check_constants(after: GraphModule, before: GraphModule, name: str) -> None:
    old = {node.target for node in before.graph.nodes if node.op == "get_attr"}
    hidden = {s for n in inputs_of(after.graph) for s in _integer_rows(n)}
    for node in after.graph.nodes:
        if node.op == "get_attr" and node.target not in old:
            value = node.meta.get("val")
            ours = str(node.target).startswith("ridgefill_")
            if isinstance(value, torch.Tensor) and not ours and hidden.intersection(value.shape):
                _fail(name, "a constant has as many entries as the prompt has rows", node)


def _integer_rows(node: Node) -> list[int]:
    """Row counts that token ids show."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.dtype == torch.int64 and value.dim() == 2:
        return [size if isinstance(size, int) else int(size.node.hint) for size in shape(node)[1:]]
    return []
