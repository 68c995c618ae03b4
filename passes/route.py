"""The method, stated: the input of every late layer is replaced on prefix rows. Nothing else changes.

    x_l                       [B, N, d]     the true input of late layer l
    x_S[:, :N-T]              [B, N-T, d]   the split state of the prefix
    x~_l = cat([A_l x_S[:, :N-T] + b_l,  x_l[:, N-T:]], rows)

Every reader of x_l reads x~_l. This graph *is* the definition of the fill; it is slow and right, and `eliminate` makes
it fast. A `cat` of two ranges of rows says what `where(row < N - T, ..)` would, in a form whose meaning needs no proof:
that x_l is read on its last T rows only follows from the rules of `slice` and `cat`, which every other model uses too.

Where rows of the prefix are selected to stay exact, at positions `index`, the prediction holds their true input:

    x~_l = cat([put_rows(A_l x_S[:, :N-T] + b_l,  index,  take_rows(x_l, index)),  x_l[:, N-T:]], rows)

Layer S itself needs no map: its input is the split state, exact on every row.

| route    | what prefix rows of late layer l > S read                                             |
|----------|----------------------------------------------------------------------------------------|
| ridge    | `A_l x_S + b_l`                                                                        |
| identity | `x_S`                                                                                  |
| none     | `x_S`, and no attention of a late layer sees those rows (layer S included)             |
| oracle   | the true `x_l`, from a second, untouched copy of the model: results must stay the same |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.utils.weak import WeakIdKeyDictionary

from ridgefill_compile.errors import CannotFill
from ridgefill_compile.passes.calls import TO_THE_END, arguments, aten, shape
from ridgefill_compile.passes.demand import SELECTION, has_effect
from ridgefill_compile.passes.emit import Emitter, copy_module, fake_mode_of, inputs_of
from ridgefill_compile.passes.locate import Located
from ridgefill_compile.passes.select_rows import select_rows
from ridgefill_compile.passes.selected_rows import put_rows, take_rows
from ridgefill_compile.selectors import Selector


class Maps(Protocol):
    """What a route reads of `RidgeMaps`."""

    def matrix(self, layer: int) -> torch.Tensor:
        """[d_out, d_in]"""

    def offset(self, layer: int) -> torch.Tensor:
        """[d_out]"""


@dataclass(frozen=True)
class Fill:
    """What to fill: the route, the split, the tail, the maps of a ridge route, and what selects rows to keep exact."""

    route: str
    split: int
    tail: int
    maps: Maps | None = None
    selectors: tuple[Selector, ...] = ()


def route(module: GraphModule, located: Located, fill: Fill) -> GraphModule:
    """A copy of the module whose late layers read predicted inputs on prefix rows.

    Args:
        module: captured graph that `located` was found in.
        located: its anatomy.
        fill: split, tail and route; `1 <= split + 1 <= layers` and `tail < rows` are the caller's to check.

    Raises:
        CannotFill: route "none" in a late layer whose attention cannot be masked.
    """
    result, copies = _copy(module)
    graph = result.graph
    emit = Emitter(graph, fake_mode_of(graph))
    for node in inputs_of(graph):
        emit.know(node)
    late = located.layers[fill.split :]
    split_state = copies[late[0].input]
    truth = _twin(graph, inputs_of(graph)) if fill.route == "oracle" else {}
    router = _Router(emit, located, fill, split_state, truth)
    if fill.selectors:
        router.selected = select_rows(emit, copies, located, fill.split, fill.tail, fill.selectors)
    for layer in late[1:]:
        router.replace(layer.index, copies[layer.input])
    if fill.route == "none":
        hide_prefix(emit, copies, located, fill)
    for name, tensor in router.tensors.items():
        result.register_buffer(name, tensor, persistent=False)
    graph.lint()
    result.recompile()
    return result


class _Router:
    """Writes the predicted input of one late layer after another."""

    def __init__(self, emit: Emitter, located: Located, fill: Fill, split_state: Node, truth: dict[Node, Node]) -> None:
        self.emit, self.located, self.fill, self.truth = emit, located, fill, truth
        self.split_state = split_state
        self.tensors: dict[str, torch.Tensor] = {}
        self.selected: Node | None = None  # positions of prefix rows that stay exact
        self._split_prefix: Node | None = None

    def replace(self, layer: int, value: Node) -> None:
        """Let every reader of a late layer's input read its prediction on prefix rows.

        Raises:
            CannotFill: the input is laid out in another way than the split state.
        """
        if len(shape(value)) != len(shape(self.split_state)):
            raise CannotFill(
                f"the input of layer {layer} is {list(shape(value))}, the split state {list(shape(self.split_state))}",
                value,
                "choose another split",
            )
        readers = list(value.users)
        after = max(node for node in (value, self.split_state, self.selected) if node is not None)
        with self.emit.graph.inserting_before(after.next):
            predicted = self.prediction(layer, value)
            if self.selected is not None:
                predicted = self._keep_selected(predicted, value, self.selected)
            exact = self.rows(value, -self.fill.tail, TO_THE_END)
            merged = self.emit(aten.cat.default, [predicted, exact], self.located.row_dim, like=value)
        for reader in readers:
            reader.replace_input_with(value, merged)

    def _keep_selected(self, predicted: Node, value: Node, index: Node) -> Node:
        """The prediction with the true input on selected rows."""
        dim, batch = self.located.row_dim, None if len(shape(index)) == 1 else 0
        exact = self.emit(take_rows, value, index, dim, batch, like=value)
        exact.meta[SELECTION] = self.fill.tail
        return self.emit(put_rows, predicted, index, exact, dim, batch, like=value)

    def prediction(self, layer: int, value: Node) -> Node:
        """Prefix rows of the layer's input, [batch, N - T, d_out]."""
        if self.fill.route == "oracle":
            return self.rows(self.truth[value], 0, -self.fill.tail)
        if self._split_prefix is None:
            with self.emit.graph.inserting_before(self.split_state.next):
                self._split_prefix = self.rows(self.split_state, 0, -self.fill.tail)
        if self.fill.route != "ridge":
            return self._on_device_of(value)
        weight, bias = self.tensor(layer, "matrix", value), self.tensor(layer, "offset", value)
        return self.emit(aten.linear.default, self._on_device_of(value), weight, bias, like=value)

    def _on_device_of(self, value: Node) -> Node:
        """The prefix of the split state where a late layer lives: a model may be spread over devices."""
        assert self._split_prefix is not None
        device = value.meta["val"].device
        if self._split_prefix.meta["val"].device == device:
            return self._split_prefix
        return self.emit(aten.to.device, self._split_prefix, device, value.meta["val"].dtype, like=value)

    def rows(self, value: Node, start: int, end: int) -> Node:
        """`value[:, start:end]` on the row dimension."""
        return self.emit(aten.slice.Tensor, value, self.located.row_dim, start, end, like=value)

    def tensor(self, layer: int, kind: str, like: Node) -> Node:
        """A map's tensor as an attribute of the module, in the model's dtype and on its device."""
        assert self.fill.maps is not None
        stored: torch.Tensor = getattr(self.fill.maps, kind)(layer)
        name = f"ridgefill_{kind}_{layer}"
        tensor = self.tensors[name] = _placed(stored, like.meta["val"])
        node = self.emit.graph.create_node("get_attr", name)
        node.meta["val"] = (
            tensor if isinstance(tensor, FakeTensor) else self.emit.mode.from_tensor(tensor, static_shapes=True)
        )
        return node


_copies: WeakIdKeyDictionary = WeakIdKeyDictionary()  # stored tensor -> its copies by device and dtype


def _placed(stored: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A map's tensor on a device and in a dtype: one copy, however many graphs are compiled."""
    copies = _copies.setdefault(stored, {})
    key = (like.device, like.dtype)
    if key not in copies:
        copy = stored.detach().to(device=like.device, dtype=like.dtype)
        if copy is stored or isinstance(copy, FakeTensor):
            return copy
        copies[key] = copy
    placed: torch.Tensor = copies[key]
    return placed


def _copy(module: GraphModule) -> tuple[GraphModule, dict[Node, Node]]:
    """A copy, and where each node went."""
    copy = copy_module(module)
    return copy, dict(zip(module.graph.nodes, copy.graph.nodes, strict=True))


def _twin(graph: torch.fx.Graph, inputs: list[Node]) -> dict[Node, Node]:
    """A second, untouched copy of the computation inside the same graph: node -> its twin.

    Effects are not repeated: the twin only computes.
    """
    twins: dict[Node, Node] = {node: node for node in inputs}
    nodes = [n for n in graph.nodes if n.op in ("call_function", "get_attr") and not has_effect(n)]
    first = inputs[-1].next
    with graph.inserting_before(first):
        for node in nodes:
            twins[node] = graph.node_copy(node, lambda n: twins[n])
    return twins


def hide_prefix(emit: Emitter, copies: dict[Node, Node], located: Located, fill: Fill) -> None:
    """Route "none": queries of late layers see no key of the prefix.

    Raises:
        CannotFill: a late layer's attention is not one call whose keys are the layer's.
    """
    calls = _attention_calls(located, fill.split)
    for call in calls:
        _hide_keys(emit, copies[call], fill.tail)


def _attention_calls(located: Located, split: int) -> list[Node]:
    found: list[Node] = []
    for layer in located.layers[split:]:
        mine = [n for state in layer.states for n in _readers(state, _is_attention)]
        if not mine:
            raise CannotFill(
                f"route 'none' needs attention in one call, and layer {layer.index} has none",
                layer.states[0],
                "load the model with attn_implementation='sdpa'",
            )
        found.extend(call for call in mine if call not in found)
    return found


def _is_attention(node: Node) -> bool:
    return node.target is aten.scaled_dot_product_attention.default


def _readers(state: Node, wanted: Callable[[Node], bool]) -> list[Node]:
    """The nearest nodes of a kind that read a state write, through caches, views and repeats."""
    found, seen, ahead = [], {state}, [state]
    while ahead:
        for reader in ahead.pop().users:
            if reader in seen:
                continue
            seen.add(reader)
            if wanted(reader):
                found.append(reader)
            else:
                ahead.append(reader)
    first = min(found, default=None)
    return [] if first is None else [first]


def _hide_keys(emit: Emitter, call: Node, tail: int) -> None:
    """Give an attention call a boolean mask [queries, keys] that also hides the prefix of this prompt.

    Query i sees key j if j is not after i, and is one of the tail's or i itself (a row that sees nothing would be NaN).
    """
    given = arguments(call)
    query, key, mask = given["query"], given["key"], given.get("attn_mask")
    value = query.meta["val"]
    queries, keys = shape(query)[-2], shape(key)[-2]
    with emit.graph.inserting_before(call):
        place = {"device": value.device, "pin_memory": False}
        count = emit.size(queries)
        key_at = emit(aten.arange.default, emit.size(keys), **place)
        shown = emit(aten.ge.Scalar, key_at, emit.minus(count, tail))
        if given.get("is_causal", False):
            query_at = emit(aten.unsqueeze.default, emit(aten.arange.default, count, **place), 1)
            causal = emit(aten.le.Tensor, key_at, query_at)
            own = emit(aten.eq.Tensor, key_at, query_at)
            shown = emit(aten.logical_or.default, emit(aten.logical_and.default, shown, causal), own)
        elif mask is None or mask.meta["val"].dtype != torch.bool:
            raise CannotFill("route 'none' needs causal attention or a boolean mask", call)
        else:
            raise CannotFill("route 'none' is for plain prompts: no padding, no continued or static cache", call)
    call.args = (query, key, given["value"], shown, 0.0, False)
    call.kwargs = {name: given[name] for name in ("scale", "enable_gqa") if name in given}
