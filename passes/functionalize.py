"""No writes in place, and no aliases that only look like work.

    x.index_copy_(2, at, k); y = f(x)      ->   x1 = index_copy(x, 2, at, k); y = f(x1); ...; x.copy_(x1)

Before: what make_fx recorded, writes included. After: every call returns a fresh value or a view, a write into an input
is one `copy_` at the end (where the inner compiler turns it back into a write in place), and casts to the type a value
already has are gone: they return their operand itself, so `x.to(float32)` would make the residual stream of a float32
model look like a node of the next norm.

torch's own functionalisation would also take whole ops (`linear`, attention) apart, so this one is by schema: op_ has a
twin op that returns what op_ writes. Writes through a view of something else that is read later are refused.
"""

from __future__ import annotations

import contextlib
import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ridgefill_compile.errors import CannotFill
from ridgefill_compile.passes.calls import arguments, aten
from ridgefill_compile.passes.demand import has_effect
from ridgefill_compile.passes.emit import Emitter, copy_module, fake_mode_of, inputs_of

NO_OPS = (aten.detach.default, aten.detach_.default, aten.alias.default, aten.lift_fresh.default)
CASTS = (
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
    aten.to.other,
    aten.type_as.default,
)


def functionalize(module: GraphModule) -> GraphModule:
    """The same computation without writes in place.

    Raises:
        CannotFill: a write whose effect on other values cannot be told from the graph.
    """
    module = copy_module(module)
    graph = module.graph
    _drop_no_ops(module)  # first: they are the same memory under another name
    emit = Emitter(graph, fake_mode_of(graph))
    _read_sizes_off_inputs(emit)
    written: dict[Node, Node] = {}
    for node in list(graph.nodes):
        if node.op == "call_function" and _writes(node.target):
            _replace_write(emit, node, written)
    output = graph.output_node()
    with graph.inserting_before(output):
        for source in inputs_of(graph):
            if source in written:
                last = graph.call_function(aten.copy_.default, (source, written[source]))
                last.meta["val"] = source.meta["val"]
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or has_effect(node))
    module.recompile()
    return module


def _writes(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return bool(schema is not None and schema.is_mutable and target not in NO_OPS)


def _read_sizes_off_inputs(emit: Emitter) -> None:
    """Let sizes come from the graph's inputs: `y.size(1)` of a value between would look like a reader of y's rows."""
    for node in inputs_of(emit.graph):
        emit.know(node)
    for node in list(emit.graph.nodes):
        if node.target is aten.sym_size.int and node.args[0].op != "placeholder":
            with emit.graph.inserting_before(node), contextlib.suppress(CannotFill):
                size = emit.size(node.meta["val"])
                if isinstance(size, Node):
                    node.replace_all_uses_with(size)
                    emit.graph.erase_node(node)


def _replace_write(emit: Emitter, node: Node, written: dict[Node, Node]) -> None:
    """Turn `op_(x, ...)` into `op(x, ...)` and make later readers of x read the result."""
    schema = node.target._schema  # type: ignore[union-attr]
    destinations = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    destination = node.args[0] if node.args else None
    if len(destinations) != 1 or schema.arguments[0].name != destinations[0].name:
        raise CannotFill("an op writes other operands than its first", node)
    if not isinstance(destination, Node):
        raise CannotFill("an op writes into something that is not a value of the graph", node)
    if is_view(destination) or any(is_view(reader) and reader < node for reader in destination.users):
        raise CannotFill("an op writes through a view, and which other values change cannot be told", node)
    node.target = _functional_twin(node)
    new = _in_the_type_of(emit, destination, node)
    for reader in list(destination.users):
        if reader > new:
            reader.replace_input_with(destination, new)
    origin = next((source for source, last in written.items() if last is destination), destination)
    for reader in list(node.users):
        if reader > new:
            reader.replace_input_with(node, new)
    written[origin] = new


def _in_the_type_of(emit: Emitter, destination: Node, node: Node) -> Node:
    """The twin's result in the type of what is written: `bf16.add_(fp32)` stays bf16, `bf16.add(fp32)` does not."""
    kept = node.meta["val"]
    node.meta["val"] = emit.value_of(node)
    if node.meta["val"].dtype == kept.dtype:
        return node
    with emit.graph.inserting_after(node):
        return emit(aten._to_copy.default, node, dtype=kept.dtype, like=node)


def _functional_twin(node: Node) -> Any:
    name = node.target._schema.name.split("::")[-1].removesuffix("_")  # type: ignore[union-attr]
    packet = getattr(aten, name, None)
    overload = node.target._overloadname  # type: ignore[union-attr]
    twin = getattr(packet, overload, None) if packet is not None else None
    if twin is None or twin._schema.is_mutable:
        raise CannotFill("an op writes in place and has no twin that does not", node)
    return twin


def is_view(node: Node) -> bool:
    """Whether a call returns (part of) its operand's memory."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return node.op == "call_function" and node.target is operator.getitem
    return any(a.alias_info is not None and not a.alias_info.is_write for a in schema.arguments) and (
        node.target not in NO_OPS
    )


def _drop_no_ops(module: GraphModule) -> None:
    for node in module.graph.nodes:
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
            continue
        source = node.args[0]
        off = node.target is aten.dropout.default and not node.args[2]
        if off or node.target in NO_OPS or (node.target in CASTS and _same_kind(node, source)):
            node.replace_all_uses_with(source)
            module.graph.erase_node(node)


def _same_kind(node: Node, source: Node) -> bool:
    """Whether a cast changes nothing. A forced copy stays: somebody may write into it."""
    new, old = node.meta.get("val"), source.meta.get("val")
    if not isinstance(new, torch.Tensor) or not isinstance(old, torch.Tensor):
        return False
    copies = arguments(node).get("copy", False)
    return new.dtype == old.dtype and new.device == old.device and new.stride() == old.stride() and not copies
