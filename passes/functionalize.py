"""No writes in place, and no aliases that only look like work.

    x.index_copy_(2, at, k); y = f(x)      ->   x1 = index_copy(x, 2, at, k); y = f(x1); ...; x.copy_(x1)
    v = x[:, :4]; v.copy_(a); y = f(x)     ->   x1 = slice_scatter(x, copy(v, a), 1, 0, 4); y = f(x1)

Before: what make_fx recorded, writes included. After: every call returns a fresh value or a view, a write into an input
is one `copy_` at the end (where the inner compiler turns it back into a write in place), and casts to the type a value
already has are gone: they return their operand itself, so `x.to(float32)` would make the residual stream of a float32
model look like a node of the next norm.

torch's own functionalisation would also take whole ops (`linear`, attention) apart, so this one is by schema: op_ has a
twin op that returns what op_ writes. A write through views is carried back to the memory they look at, step by step,
and whatever else looks at it is looked up anew. What has no such step back is refused.
"""

from __future__ import annotations

import contextlib
import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from ridgefill_compile.errors import CannotFill
from ridgefill_compile.passes.calls import arguments, aten, shape
from ridgefill_compile.passes.demand import has_effect
from ridgefill_compile.passes.emit import Emitter, copy_module, fake_mode_of, inputs_of

NO_OPS = (aten.detach.default, aten.detach_.default, aten.alias.default, aten.lift_fresh.default)
DROPOUTS = (aten.dropout.default, aten.alpha_dropout.default, aten.feature_dropout.default)
FRESH = (  # composite ops whose result is always memory of its own
    aten.linear.default, aten.matmul.default, aten.layer_norm.default, aten.rms_norm.default, aten.softmax.int,
    aten.log_softmax.int, aten.scaled_dot_product_attention.default, aten.conv1d.default, aten.one_hot.default,
    aten.where.Scalar, aten.where.ScalarSelf, aten.where.ScalarOther, aten.floor_divide.default,
    aten.zeros_like.default, aten.embedding.default, aten.sort.default, aten.pad.default, aten.outer.default,
)  # fmt: skip
FACTORIES: dict[Any, Any] = {
    aten.new_zeros.default: aten.zeros.default,
    aten.new_ones.default: aten.ones.default,
    aten.new_full.default: aten.full.default,
    aten.new_empty.default: aten.empty.memory_format,
}
LIKE: dict[Any, Any] = {
    aten.zeros_like.default: aten.zeros.default,
    aten.ones_like.default: aten.ones.default,
    aten.full_like.default: aten.full.default,
}
LIKE_ANOTHER = (aten.type_as.default, aten.to.other)
RESHAPES = (aten.view.default, aten.reshape.default, aten.squeeze.dim, aten.flatten.using_ints)
CASTS = (
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
    aten.to.other,
    aten.type_as.default,
)
COPIES = (*CASTS, aten._to_copy.default, aten.clone.default, aten.contiguous.default)


def functionalize(module: GraphModule) -> GraphModule:
    """The same computation without writes in place.

    Raises:
        CannotFill: a write whose effect on other values cannot be told from the graph.
    """
    module = copy_module(module)
    graph = module.graph
    emit = Emitter(graph, fake_mode_of(graph))
    _read_sizes_off_inputs(emit)
    memory = _Memory(emit)
    for node in list(graph.nodes):
        memory.pass_by(node)
    output = graph.output_node()
    with graph.inserting_before(output):
        for source in inputs_of(graph):
            if memory.now[source] is not source:
                last = graph.call_function(aten.copy_.default, (source, memory.now[source]))
                last.meta["val"] = source.meta["val"]
    _drop_no_ops(module)
    _read_past_writes(graph)
    _free_of_examples(emit)
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
            with _at_the_top(emit.graph), contextlib.suppress(CannotFill):
                size = emit.size(node.meta["val"])
                if isinstance(size, Node):
                    node.replace_all_uses_with(size)
                    emit.graph.erase_node(node)


def _at_the_top(graph: Graph) -> contextlib.AbstractContextManager[None]:
    """Where sizes are read, which any node may use."""
    first: contextlib.AbstractContextManager[None] = graph.inserting_before(
        next(node for node in graph.nodes if node.op != "placeholder")
    )
    return first


class _Memory:
    """What every value holds now, as the graph is passed by from front to back.

    Attributes:
        now: value -> the value that holds what its memory holds at this point.
        views, operands: every value -> the value it is a view of, or None; and the values it is made of, as traced.
        looks_at: the same of those passed by, former writes included.
        names: of these, those that are the value they look at under another name, as the result of a write is.
        written: value with memory of its own -> how often it has been written into, itself or through views.
        seen: view -> that number when it was last looked up.
        unsure: value that may be a view -> the owners of what it may look at, and that number when it was computed.
    """

    def __init__(self, emit: Emitter) -> None:
        self.emit = emit
        self.views = {node: _looked_at(node) for node in emit.graph.nodes}  # of the values as traced
        self.operands = {node: node.all_input_nodes for node in emit.graph.nodes}
        self.now: dict[Node, Node] = {}
        self.looks_at: dict[Node, Node] = {}
        self.names: set[Node] = set()
        self.written: dict[Node, int] = {}
        self.seen: dict[Node, int] = {}
        self.unsure: dict[Node, list[tuple[Node, int]]] = {}

    def pass_by(self, node: Node) -> None:
        """Let a node read what its operands hold now; if it writes, turn it into a call that returns what it writes."""
        source = self.views[node]
        destination = _destination(node) if node.op == "call_function" and _writes(node.target) else None
        with self.emit.graph.inserting_before(node):
            fresh = {operand: self.current(operand) for operand in node.all_input_nodes}
        for operand, value in fresh.items():
            if value is not operand:
                node.replace_input_with(operand, value)
        self.now[node] = node
        if destination is not None:
            self.write(node, destination)
        elif source is not None:
            self.looks_at[node] = source
            self.seen[node] = self.written[self.owner(node)]
            if returns_operand(node):
                self.names.add(node)
        else:
            self.written[node] = 0
        if may_share_silently(node):
            self.unsure[node] = [(owner, self.written[owner]) for owner in map(self.owner, self.operands[node])]

    def owner(self, value: Node) -> Node:
        """The value whose memory this one lies in."""
        while value in self.looks_at:
            value = self.looks_at[value]
        return value

    def current(self, value: Node) -> Node:
        """What a value's memory holds now: itself, or looked up anew after a write."""
        if any(self.written[owner] != count for owner, count in self.unsure.get(value, ())):
            raise CannotFill("an op writes into what may be this value's memory", value)
        if value not in self.looks_at:
            return self.now[value]
        version = self.written[self.owner(value)]
        if self.seen[value] != version:
            above = self.looks_at[value]
            self.now[value] = self._look(value, self.current(above))
            self.seen[value] = version
        return self.now[value]

    def _look(self, view: Node, source: Node) -> Node:
        """The same view of another value."""
        if view in self.names:
            return source
        if view.target is aten.as_strided.default:
            raise CannotFill("an op writes under a view by strides, which cannot be looked up anew", view)
        copy = self.emit.graph.node_copy(view, lambda n: n)
        copy.args = (source, *copy.args[1:])
        return copy

    def write(self, node: Node, destination: Node) -> None:
        """`op_(x, ...)` becomes `op(x, ...)`; x holds the result from here on, and so does what x is a view of."""
        if may_share_silently(self.owner(destination)):
            raise CannotFill("an op writes into what may be another value's memory", node)
        node.target = _functional_twin(node)
        value = _in_the_type_of(self.emit, node.args[0], node)  # type: ignore[arg-type]
        owner, after = self.owner(destination), value.next
        with self.emit.graph.inserting_before(after):
            held, at = value, destination
            while at in self.looks_at:
                view, at = at, self.looks_at[at]
                if view.target is operator.getitem:
                    at = self.looks_at[at]  # of what was cut into pieces
                if view not in self.names:
                    held = _write_back(self.emit, view, self.current(at), held, node)
        self.written[owner] += 1
        self.now[owner] = held
        self.now[destination] = value
        if destination is not owner:
            self.seen[destination] = self.written[owner]
        # The call's own result is the destination under another name.
        self.looks_at[node], self.now[node], self.seen[node] = destination, value, self.written[owner]
        self.names.add(node)


def _destination(node: Node) -> Node:
    """What a call writes into.

    Raises:
        CannotFill: other than its first operand.
    """
    schema = node.target._schema  # type: ignore[union-attr]
    destinations = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    destination = node.args[0] if node.args else None
    if len(destinations) != 1 or schema.arguments[0].name != destinations[0].name:
        raise CannotFill("an op writes other operands than its first", node)
    if not isinstance(destination, Node):
        raise CannotFill("an op writes into something that is not a value of the graph", node)
    return destination


def _write_back(emit: Emitter, view: Node, source: Node, value: Node, write: Node) -> Node:
    """`source` with `value` where `view` looks at it.

    Raises:
        CannotFill: the view has no step back (it repeats entries, or overlaps itself).
    """
    if view.target is aten.contiguous.default:
        return value
    if view.target is operator.getitem:
        return _piece_back(emit, view, source, value, write)
    given = arguments(view)
    if view.target is aten.slice.Tensor:
        place = [given[name] for name in ("dim", "start", "end", "step")]
        return emit(aten.slice_scatter.default, source, value, *place, like=write)
    if view.target is aten.select.int:
        return emit(aten.select_scatter.default, source, value, given["dim"], given["index"], like=write)
    if view.target in (aten.transpose.int, aten.t.default, aten.mT.default):
        return emit(view.target, value, *view.args[1:], like=write)
    if view.target is aten.permute.default:
        order = [dim % len(given["dims"]) for dim in given["dims"]]
        return emit(aten.permute.default, value, [order.index(dim) for dim in range(len(order))], like=write)
    if view.target is aten.unsqueeze.default:
        return emit(aten.squeeze.dim, value, given["dim"], like=write)
    if view.target in RESHAPES:
        sizes = [emit.size(size) for size in shape(source)]
        return emit(aten.reshape.default, value, sizes, like=write)
    raise CannotFill(f"an op writes through a view by {view.target}, which cannot be carried back", write)


def _in_the_type_of(emit: Emitter, destination: Node, node: Node) -> Node:
    """The twin's result in the type of what is written: `bf16.add_(fp32)` stays bf16, `bf16.add(fp32)` does not."""
    kept = node.meta["val"]
    node.meta["val"] = emit.value_of(node)
    if node.meta["val"].dtype == kept.dtype:
        return node
    with emit.graph.inserting_after(node):
        return emit(aten._to_copy.default, node, dtype=kept.dtype, like=node)


def _piece_back(emit: Emitter, view: Node, source: Node, value: Node, write: Node) -> Node:
    """`source` with `value` as one of the pieces it is cut into."""
    cut, number = view.args
    assert isinstance(cut, Node)
    assert isinstance(number, int)
    if cut.target not in (aten.unbind.int, aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default):
        raise CannotFill("an op writes into one of several results", write)
    dim = arguments(cut)["dim"]
    if cut.target is aten.unbind.int:
        return emit(aten.select_scatter.default, source, value, dim, number, like=write)
    lengths = [piece.shape[dim] for piece in cut.meta["val"][: number + 1]]
    start, end = emit.size(sum(lengths[:-1])), emit.size(sum(lengths))
    return emit(aten.slice_scatter.default, source, value, dim, start, end, like=write)


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
    return _looked_at(node) is not None


def memory_of(node: Node) -> Node:
    """The node whose memory a value lies in."""
    while (source := _looked_at(node)) is not None:
        node = source
    return node


def _looked_at(node: Node) -> Node | None:
    """The operand whose memory a call returns, if it does. Ops that may copy (`reshape`) are asked for their values."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return None
    source = node.args[0]
    schema = getattr(node.target, "_schema", None)
    if node.target is operator.getitem:
        inner = source.args[0] if source.args and isinstance(source.args[0], Node) else None
        return source if inner is not None and _shares(node, inner) else None
    if schema is None:
        return None
    if returns_operand(node):
        return source
    aliases = any(a.alias_info is not None and not a.alias_info.is_write for a in schema.arguments)
    return source if aliases and _shares(node, source) else None


def returns_operand(node: Node) -> bool:
    """Whether a call returns its first operand itself, under another name."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return False
    off = node.target in DROPOUTS and not node.args[2]
    return off or node.target in NO_OPS or (node.target in CASTS and _same_kind(node, node.args[0]))


def may_share_silently(node: Node) -> bool:
    """Whether a call may return its operand's memory without its schema saying so, as composite ops do at times."""
    if node.target is operator.getitem:
        return may_share_silently(node.args[0])  # type: ignore[arg-type]
    if not isinstance(node.target, torch._ops.OpOverload) or node.target in (*FRESH, *CASTS):
        return False
    if returns_operand(node):
        return False
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(node.target.name(), "CompositeImplicitAutograd")
    return composite and not any(a.alias_info is not None for a in node.target._schema.arguments)


def _shares(node: Node, other: Node) -> bool:
    """Whether two values lie in the same memory, as far as their fake values know."""
    mine, theirs = ([x for x in tree_leaves(n.meta.get("val")) if isinstance(x, torch.Tensor)] for n in (node, other))
    if not mine or not theirs:
        return True
    return any(a.untyped_storage()._cdata == b.untyped_storage()._cdata for a in mine for b in theirs)


def _drop_no_ops(module: GraphModule) -> None:
    for node in module.graph.nodes:
        if returns_operand(node):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)


def _free_of_examples(emit: Emitter) -> None:
    """`x.new_ones(size)` reads nothing of x but its type and device, as `y.type_as(x)` does, and `ones_like(x)` but its
    size, too.
    """
    for node in emit.graph.nodes:
        value = node.meta.get("val")
        if node.target in LIKE_ANOTHER:
            node.target, node.args = aten._to_copy.default, node.args[:1]
            node.kwargs = {"dtype": value.dtype, "device": value.device}
            continue
        if node.target in FACTORIES:
            node.target, node.args = FACTORIES[node.target], node.args[1:]
        elif node.target in LIKE and value.is_contiguous():
            with _at_the_top(emit.graph):
                try:
                    size = [emit.size(length) for length in value.shape]
                except CannotFill:  # a size that no input shows
                    continue
            node.target, node.args = LIKE[node.target], (size, *node.args[1:2])
        else:
            continue
        node.kwargs = {"dtype": value.dtype, "device": value.device, "pin_memory": False}


def _read_past_writes(graph: Graph) -> None:
    """An entry read after others were written is read before: one buffer of all layers' states ties none together."""
    for node in graph.nodes:
        while node.target is aten.select.int:
            source, dim, index = node.args
            if source.target is not aten.select_scatter.default:
                break
            buffer, _, written_dim, written = source.args
            numbers = (dim, index, written_dim, written)
            if not all(isinstance(n, int) and n >= 0 for n in numbers) or dim != written_dim or index == written:
                break
            node.replace_input_with(source, buffer)


def _same_kind(node: Node, source: Node) -> bool:
    """Whether a cast changes nothing. A forced copy stays: somebody may write into it."""
    new, old = node.meta.get("val"), source.meta.get("val")
    if not isinstance(new, torch.Tensor) or not isinstance(old, torch.Tensor):
        return False
    given = arguments(node)
    relaid = given.get("memory_format") not in (None, torch.preserve_format)
    return new.dtype == old.dtype and new.device == old.device and not relaid and not given.get("copy", False)
