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

Where maps predict projections (see `cuts.py`), the same is done to each of a layer's in place of its input, which is
then read on the tail (and selected rows) alone:

    k~_l = cat([K_l x_S[:, :N-T] + b_l,  k_l[:, N-T:]], rows)

| route    | what prefix rows of late layer l > S read                                             |
|----------|----------------------------------------------------------------------------------------|
| ridge    | `A_l x_S + b_l`                                                                        |
| identity | `x_S`                                                                                  |
| none     | `x_S`, and no attention of a late layer sees those rows (layer S included)             |
| oracle   | the true `x_l`, from a second, untouched copy of the model: results must stay the same |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.utils.weak import WeakIdKeyDictionary

from ridgefill_compile.errors import CannotFill
from ridgefill_compile.host_maps import in_host_memory
from ridgefill_compile.int8 import Codes, dequantise
from ridgefill_compile.passes.attention_states import AttentionStates, attention_states
from ridgefill_compile.passes.calls import TO_THE_END, arguments, aten, shape
from ridgefill_compile.passes.chunk_inputs import BEFORE, EXACT, SCANNED, ChunkInputs
from ridgefill_compile.passes.correct import Correction, correct
from ridgefill_compile.passes.cuts import Cut, cuts_of
from ridgefill_compile.passes.demand import SELECTION, has_effect
from ridgefill_compile.passes.emit import Emitter, copy_module, fake_mode_of, inputs_of
from ridgefill_compile.passes.filled_states import FilledStates
from ridgefill_compile.passes.find_attention import ATTENTION
from ridgefill_compile.passes.inline import inline
from ridgefill_compile.passes.locate import Located
from ridgefill_compile.passes.select_rows import select_rows, valid_rows
from ridgefill_compile.passes.selected_rows import put_rows, take_rows
from ridgefill_compile.passes.terminal_state import AT_START, StateCorrection, correct_states, late_scans
from ridgefill_compile.selectors import Selector
from ridgefill_compile.splitmaps import INPUT


class Maps(Protocol):
    """What a route reads of `RidgeMaps`."""

    @property
    def norm(self) -> float | None:
        """Added to the mean square of the split state where it is divided by its root first; None: it is not."""

    def matrix(self, layer: int) -> torch.Tensor:
        """[d_out, d_in]: the rows of the layer's first cut, below them those of the second, ..."""

    def offset(self, layer: int) -> torch.Tensor:
        """[d_out]"""

    def codes(self, layer: int) -> Codes | None:
        """The matrix as it is stored, if that is in eight bits."""


@dataclass(frozen=True)
class Fill:
    """What to fill: the route, the split, the tail, the maps of a ridge route, what selects rows to
    keep exact, how many first rows of each sequence stay so, and the tokenizer's table for selectors that read tokens.

    Of a chunk before the prompt's tail, `tail` is 0. Where the tail begins in it, or its first rows stay exact, `tail`
    is 1, and further inputs of the graph tell the other exact rows: `given`.

    `cut`: what is predicted of a late layer. `stream_maps`: maps stay in host memory, and are fetched layer by layer.
    """

    route: str
    split: int
    tail: int
    maps: Maps | None = None
    selectors: tuple[Selector, ...] = ()
    first_rows: int = 0
    tokens: Mapping[str, torch.Tensor] | None = None
    given: ChunkInputs | None = None
    cut: str = INPUT
    correction: Correction = field(default_factory=Correction)
    state_correction: StateCorrection | None = None
    stream_maps: bool = False


def route(module: GraphModule, located: Located, fill: Fill) -> GraphModule:
    """A copy of the module whose late layers read predicted inputs on prefix rows.

    Args:
        module: captured graph that `located` was found in.
        located: its anatomy.
        fill: split, tail and route; `1 <= split + 1 <= layers` and `tail < rows` are the caller's to check.

    Raises:
        CannotFill: route "none" in a late layer whose attention cannot be masked, or a late layer that has no
            projections, where they are predicted.
    """
    cuts = cuts_of(located, fill.split, fill.cut)
    result, copies = _copy(module)
    graph = result.graph
    emit = Emitter(graph, fake_mode_of(graph))
    for node in inputs_of(graph):
        emit.know(node)
    split_state = copies[located.layers[fill.split].input]
    truth = _twin(graph, inputs_of(graph)) if fill.route == "oracle" or fill.correction.splice else {}
    router = _Router(emit, located, fill, cuts, split_state, truth)
    given: dict[str, Node] = {}
    if fill.given is not None:
        given = fill.given.add(graph, emit, split_state.meta["val"].device)
        router.selected = given[EXACT]
    elif fill.selectors or fill.first_rows:
        router.selected = router.select(copies)
    for cut in cuts:
        router.replace(cut, copies[cut.value])
    if fill.correction:
        router.correct(copies, attention_states(module.graph, located, fill.split), given)
    if fill.state_correction is not None:
        router.correct_states(copies, fill.state_correction, given)
    if fill.route == "none":
        hide_prefix(emit, copies, located, fill, router.selected)
    if fill.tail == 0:
        _deny(emit, copies[located.result])
    for name, tensor in router.tensors.items():
        result.register_buffer(name, tensor, persistent=False)
    graph.lint()
    result.recompile()
    return result


class _Router:
    """Writes the predicted input, or projections, of one late layer after another."""

    def __init__(
        self,
        emit: Emitter,
        located: Located,
        fill: Fill,
        cuts: tuple[Cut, ...],
        split_state: Node,
        truth: dict[Node, Node],
    ) -> None:
        self.emit, self.located, self.fill, self.cuts, self.truth = emit, located, fill, cuts, truth
        self.split_state = split_state
        self.tensors: dict[str, torch.Tensor] = {}
        self.selected: Node | None = None  # positions of prefix rows that stay exact
        self.merged: dict[Cut, Node] = {}  # each cut, predicted on prefix rows
        self._split_prefix: Node | None = None
        self._norms: dict[Node, Node] = {}  # rows of the split state -> what maps read of them

    def select(self, copies: dict[Node, Node]) -> Node:
        """Positions of the prefix rows that stay exact."""
        fill, tables = self.fill, {}
        if fill.tokens is not None:
            with self.emit.graph.inserting_before(self.split_state.next):
                tables = {
                    name: self.tensor(f"token_{name}", tensor, self.split_state, tensor.dtype)
                    for name, tensor in fill.tokens.items()
                }
        readers = max((getattr(selector, "sweep", 0) for selector in fill.selectors), default=0)
        swept = self.first_sweep(copies, min(readers, fill.tail)) if readers else None
        return select_rows(
            self.emit, copies, self.located, fill.split, fill.tail, fill.selectors, tables, swept, fill.first_rows
        )

    def first_sweep(self, copies: dict[Node, Node], readers: int) -> dict[Node, Node]:
        """A second copy of the late layers, behind the split state, in which only the last `readers` rows are exact."""
        predicted = {cut.value: cut for cut in self.cuts}
        start = self.located.layers[self.fill.split].input
        swept = dict(copies)
        late = [
            n for n in start.graph.nodes if n > start and n.op in ("call_function", "get_attr") and not has_effect(n)
        ]
        with self.emit.graph.inserting_before(self.split_state.next):
            prefix = self.rows(self.split_state, 0, -readers)
            for node in late:
                new = swept[node] = self.emit.graph.node_copy(node, swept.__getitem__)
                if node in predicted:
                    filled = self.prediction(predicted[node], new, prefix)
                    exact = self.rows(new, -readers, TO_THE_END)
                    swept[node] = self.emit(aten.cat.default, [filled, exact], self.located.row_dim, like=new)
        return swept

    def replace(self, cut: Cut, value: Node) -> None:
        """Let every reader of a late layer's cut read its prediction on prefix rows.

        Raises:
            CannotFill: the input is laid out in another way than the split state.
        """
        if len(shape(value)) != len(shape(self.split_state)):
            raise CannotFill(
                f"the input of layer {cut.layer} is {list(shape(value))}, "
                f"the split state {list(shape(self.split_state))}",
                value,
                "choose another split",
            )
        readers = list(value.users)
        after = max(node for node in (value, self.split_state, self.selected) if node is not None)
        with self.emit.graph.inserting_before(after.next):
            predicted = self.prediction(cut, value)
            if self.selected is not None:
                predicted = self._keep_selected(predicted, value, self.selected)
            merged = predicted
            if self.fill.tail > 0:
                exact = self.rows(value, -self.fill.tail, TO_THE_END)
                merged = self.emit(aten.cat.default, [predicted, exact], self.located.row_dim, like=value)
        for reader in readers:
            reader.replace_input_with(value, merged)
        self.merged[cut] = merged

    def correct(self, copies: dict[Node, Node], states: AttentionStates, given: Mapping[str, Node]) -> None:
        """Correct the keys and values of filled rows."""

        def predict(layer: int) -> dict[Node, Node]:
            mine = {cut: copies[cut.value] for cut in self.cuts if cut.layer == layer}
            if self.fill.route == "oracle":
                return {self.merged[cut]: self.truth[value] for cut, value in mine.items()}
            return {self.merged[cut]: self.prediction(cut, value, self.split_state) for cut, value in mine.items()}

        filled = FilledStates(
            self.emit, dict(copies), self.split_state, self.located.row_dim, self.fill.tail, self.selected, given
        )
        correct(filled, states, self.fill.correction, predict, self.truth)

    def correct_states(self, copies: dict[Node, Node], correction: StateCorrection, given: Mapping[str, Node]) -> None:
        """Correct the states that recurrences have at the prefix's end."""

        def difference(layer: int, like: Node) -> Node:
            return self.tensor(f"state_{layer}", correction.differences[layer], like, torch.float32)

        found = late_scans(self.located, self.fill.split).found
        scans = {layer: copies[scan] for layer, scan in found.items()}
        valid, chunk = valid_rows(self.emit), self.fill.given
        end = self.fill.tail if chunk is None else given[SCANNED] if chunk.scanned else AT_START
        before = given.get(BEFORE)
        correct_states(self.emit, scans, correction.strength, end, difference, self.selected, valid, before)

    def _keep_selected(self, predicted: Node, value: Node, index: Node) -> Node:
        """The prediction with the true input on selected rows."""
        dim, batch = self.located.row_dim, None if len(shape(index)) == 1 else 0
        exact = self.emit(take_rows, value, index, dim, batch, like=value)
        exact.meta[SELECTION] = self.fill.tail
        return self.emit(put_rows, predicted, index, exact, dim, batch, like=value)

    def prediction(self, cut: Cut, value: Node, prefix: Node | None = None) -> Node:
        """Prefix rows of a cut, [batch, N - T, width]; or what rows `prefix` of the split state predict."""
        if self.fill.route == "oracle" and prefix is None:
            return self.rows(self.truth[value], 0, -self.fill.tail)
        if prefix is None and self._split_prefix is None:
            with self.emit.graph.inserting_before(self.split_state.next):
                end = -self.fill.tail if self.fill.tail > 0 else TO_THE_END
                self._split_prefix = self.rows(self.split_state, 0, end)
        prefix = prefix or self._split_prefix
        assert prefix is not None
        if self.fill.route != "ridge":
            return self._on_device_of(value, prefix)
        assert self.fill.maps is not None
        weight = self.matrix(cut, value)
        bias = self.of_cut(cut, self.tensor(f"offset_{cut.layer}", self.fill.maps.offset(cut.layer), value))
        read = self._on_device_of(value, self._normed(prefix))
        return self.emit(aten.linear.default, read, weight, bias, like=value)

    def _normed(self, prefix: Node) -> Node:
        """Rows of the split state as maps read them."""
        assert self.fill.maps is not None
        epsilon = self.fill.maps.norm
        if epsilon is None:
            return prefix
        if prefix not in self._norms:
            with self.emit.graph.inserting_before(prefix.next):
                width = int(shape(prefix)[-1])
                self._norms[prefix] = self.emit(aten.rms_norm.default, prefix, [width], None, epsilon, like=prefix)
        return self._norms[prefix]

    def _on_device_of(self, value: Node, prefix: Node) -> Node:
        """Rows of the split state where a late layer lives, in its dtype: a model may be spread over devices."""
        mine, there = prefix.meta["val"], value.meta["val"]
        if (mine.device, mine.dtype) == (there.device, there.dtype):
            return prefix
        return self.emit(aten.to.device, prefix, there.device, there.dtype, like=value)

    def rows(self, value: Node, start: int, end: int) -> Node:
        """`value[:, start:end]` on the row dimension."""
        return self.emit(aten.slice.Tensor, value, self.located.row_dim, start, end, like=value)

    def matrix(self, cut: Cut, like: Node) -> Node:
        """A cut's matrix [width, d_in], made of its codes in the graph where it is stored in eight bits."""
        assert self.fill.maps is not None
        stored, dtype = self.fill.maps.codes(cut.layer), like.meta["val"].dtype
        if self.fill.stream_maps:
            return self.streamed_matrix(cut, like)
        if stored is None:
            return self.of_cut(cut, self.tensor(f"matrix_{cut.layer}", self.fill.maps.matrix(cut.layer), like))
        parts = [
            self.of_cut(cut, self.tensor(f"{kind}_{cut.layer}", part, like, part.dtype))
            for kind, part in stored._asdict().items()
        ]
        (matrix,) = inline(self.emit, lambda codes, scales: dequantise(codes, scales, dtype), parts)
        return matrix

    def streamed_matrix(self, cut: Cut, like: Node) -> Node:
        """The same, fetched from host memory when the layer's exact rows are there, and the next one's set out for."""
        value, place = like.meta["val"], self.cuts.index(cut)
        behind = self.cuts[place + 1] if place + 1 < len(self.cuts) else cut
        last = self.rows(like if self.fill.tail > 0 else self.split_state, -1, TO_THE_END)
        parts = []
        for kind, stored in self.stored(cut).items():
            ahead = self.stored(behind).get(kind, stored)
            mine = self.host_tensor(f"{kind}_{cut.layer}_{cut.start}", stored, value.device)
            after = self.host_tensor(f"{kind}_{behind.layer}_{behind.start}", ahead, value.device)
            parts.append(self.emit(torch.ops.ridgefill.from_host.default, mine, after, last, like=like))
        if len(parts) == 1:
            return self.emit(aten.to.dtype, parts[0], value.dtype, like=like)
        (matrix,) = inline(self.emit, lambda codes, scales: dequantise(codes, scales, value.dtype), parts)
        return matrix

    def stored(self, cut: Cut) -> dict[str, torch.Tensor]:
        """What the maps hold of a cut's matrix: itself, or its codes and scales."""
        assert self.fill.maps is not None
        codes, end = self.fill.maps.codes(cut.layer), cut.start + cut.width
        whole = {"matrix": self.fill.maps.matrix(cut.layer)} if codes is None else codes._asdict()
        return {k: tensor if len(tensor) == cut.width else tensor[cut.start : end] for k, tensor in whole.items()}

    def host_tensor(self, name: str, stored: torch.Tensor, device: torch.device) -> Node:
        """A stored tensor as an attribute of the module, in host memory."""
        name = f"ridgefill_host_{name}"
        if name not in self.tensors:
            self.tensors[name] = stored if isinstance(stored, FakeTensor) else in_host_memory(stored, device)
        tensor = self.tensors[name]
        node = self.emit.graph.create_node("get_attr", name)
        fake = isinstance(tensor, FakeTensor)
        node.meta["val"] = tensor if fake else self.emit.mode.from_tensor(tensor, static_shapes=True)
        return node

    def of_cut(self, cut: Cut, stored: Node) -> Node:
        """Of a tensor of a layer's map, the rows that are a cut's."""
        if shape(stored)[0] == cut.width:
            return stored
        return self.emit(aten.slice.Tensor, stored, 0, cut.start, cut.start + cut.width)

    def tensor(self, name: str, stored: torch.Tensor, like: Node, dtype: torch.dtype | None = None) -> Node:
        """A stored tensor as an attribute of the module, on the model's device and (unless given) in its dtype."""
        name = f"ridgefill_{name}"
        place = like.meta["val"]
        tensor = self.tensors[name] = _placed(stored, place.device, dtype or place.dtype)
        node = self.emit.graph.create_node("get_attr", name)
        node.meta["val"] = (
            tensor if isinstance(tensor, FakeTensor) else self.emit.mode.from_tensor(tensor, static_shapes=True)
        )
        return node


_copies: WeakIdKeyDictionary = WeakIdKeyDictionary()  # stored tensor -> its copies by device and dtype


def _placed(stored: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A stored tensor on a device and in a dtype: one copy, however many graphs are compiled."""
    copies = _copies.setdefault(stored, {})
    key = (device, dtype)
    if key not in copies:
        copy = stored.detach().to(device=device, dtype=dtype)
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


def _deny(emit: Emitter, result: Node) -> None:
    """Return NaN in place of the logits: every row is filled, so none has any."""
    value = result.meta["val"]
    output = emit.graph.output_node()
    with emit.graph.inserting_before(output):
        size = [emit.size(length) for length in shape(result)]
        nothing = emit(aten.full.default, size, float("nan"), dtype=value.dtype, device=value.device, pin_memory=False)
    output.replace_input_with(result, nothing)


def hide_prefix(
    emit: Emitter, copies: dict[Node, Node], located: Located, fill: Fill, selected: Node | None = None
) -> None:
    """Route "none": queries of late layers see no key of the prefix but those of selected rows.

    Raises:
        CannotFill: a late layer's attention is not one call whose keys are the layer's.
    """
    calls = _attention_calls(located, fill.split)
    for call in calls:
        _hide_keys(emit, copies[call], fill.tail, selected)


def _attention_calls(located: Located, split: int) -> list[Node]:
    found: list[Node] = []
    for layer in located.layers[split:]:
        mine = [n for state in layer.states for n in _readers(state, lambda node: node.target is ATTENTION)]
        if not mine:
            raise CannotFill(
                f"route 'none' needs attention in one call, and layer {layer.index} has none",
                layer.states[0],
                "load the model with attn_implementation='sdpa'",
            )
        found.extend(call for call in mine if call not in found)
    return found


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


def _hide_keys(emit: Emitter, call: Node, tail: int, selected: Node | None) -> None:
    """Give an attention call a boolean mask [queries, keys] that also hides the prefix of this prompt.

    Query i sees key j if j is not after i, and is selected, one of the tail's or i itself (a row that sees nothing
    would be NaN).
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
        if selected is not None:
            (shown,) = inline(emit, _also_at, [shown, selected])
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


def _also_at(shown: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Of keys [keys] that are shown, also those at an index; [batch, 1, 1, keys] where each sequence has its own."""
    if index.dim() == 1:
        return shown.index_fill(0, index, True)
    return shown.expand(index.shape[0], -1).scatter(1, index, True)[:, None, None]
