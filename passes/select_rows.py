"""The rows that stay exact, selected inside the graph: from the attention of layers below the split, or from the ids;
and the first rows of each sequence, where maps do not predict them.

Adds one value, the positions of the selected rows: int64 [count], or [batch, count] where each sequence has its own.
Their number is a function of the prompt's length alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from ridgefill_compile.capture import ARGUMENT
from ridgefill_compile.errors import CannotFill
from ridgefill_compile.passes.calls import arguments, aten, positive, shape
from ridgefill_compile.passes.emit import Emitter, inputs_of
from ridgefill_compile.passes.find_attention import ATTENTION, SpelledOut, spelled_out
from ridgefill_compile.passes.functionalize import COPIES
from ridgefill_compile.passes.inline import inline
from ridgefill_compile.passes.locate import Located
from ridgefill_compile.passes.rows import IntLike, same
from ridgefill_compile.prompt import LayerAttention, Prompt, real_rows
from ridgefill_compile.selectors import Selector, choose
from ridgefill_compile.tokens import TokenTable

LAID_OUT = (
    *COPIES, aten.transpose.int, aten.expand.default, aten.view.default, aten.reshape.default,
    aten.unsqueeze.default, aten.permute.default, aten.slice.Tensor,
)  # fmt: skip


def select_rows(
    emit: Emitter,
    copies: Mapping[Node, Node],
    located: Located,
    split: int,
    tail: int,
    selectors: Sequence[Selector],
    tokens: Mapping[str, Node] | None = None,
    swept: Mapping[Node, Node] | None = None,
    first_rows: int = 0,
) -> Node:
    """Add the positions of the rows that selectors choose, right behind the split state.

    Args:
        emit: writes the graph that `copies` are nodes of.
        copies: node of the located graph -> its copy.
        located: anatomy of the graph.
        split: first late layer.
        tail: last prompt rows, which are exact anyway.
        selectors: of which rows to keep.
        tokens: the tokenizer's table, as nodes.
        swept: node of the located graph -> its copy in a first sweep over the late layers.
        first_rows: first rows of each sequence, which are kept, too.

    Raises:
        CannotFill: a selector needs what the graph does not hold, or it cannot be told which rows are padding.
    """
    state = copies[located.layers[split].input]
    ids = _token_ids(located, copies)
    early = _known_parts(copies, located, range(split))
    valid, telling = _what_tells_padding(emit, early, _Parts(copies, located, split), located, ids)
    layers = list(early) if selectors else []
    layers += [parts for parts in telling if parts not in layers]
    by = layers.index(telling[0]) if valid is not None and telling else None
    late = len(layers)
    if swept is not None:
        layers += _known_parts(swept, located, range(split, len(located.layers)))
    operands = _Operands()
    places = [{name: operands.add(node) for name, node in parts.nodes.items()} for parts in layers]
    known = {name: operands.add(node) for name, node in (("state", state), ("ids", ids), ("valid", valid)) if node}
    tables = {name: operands.add(node) for name, node in (tokens or {}).items()}
    one_index = (not selectors and not layers and valid is None) or not _has_sequences(state, located)

    def index(*values: Any) -> torch.Tensor:
        attention = tuple(
            parts.attention({name: values[place] for name, place in at.items()})
            for parts, at in zip(layers, places, strict=True)
        )
        split_state = values[known["state"]]
        rows = split_state.shape[located.row_dim]
        given = values[known["ids"]] if "ids" in known else None
        if "valid" in known:
            mask = values[known["valid"]]
            valid = (mask[:, -rows:] if by is None else mask_of_rows(mask, attention[by], rows)) != 0
        else:
            valid = real_rows(attention[:late], rows)
        prompt = Prompt(
            batch=1 if one_index else split_state.shape[0],
            rows=rows,
            prefix=rows - tail,
            first=former_rows(attention, rows),
            device=split_state.device,
            ids=given if given is None or given.dim() == 2 else given.unsqueeze(0),
            valid=valid,
            attention=tuple(each for each in attention if each.layer < split),
            late_attention=attention[late:],
            tokens=TokenTable(**{name: values[place] for name, place in tables.items()}) if tables else None,
        )
        chosen = choose(prompt, selectors, first_rows)
        return chosen[0] if one_index else chosen

    after = max([state, *operands.nodes])
    with emit.graph.inserting_before(after.next):
        (result,) = inline(emit, index, operands.nodes)
    return result


def _what_tells_padding(
    emit: Emitter, early: Sequence[_Parts], own: _Parts, located: Located, ids: Node | None
) -> tuple[Node | None, Sequence[_Parts]]:
    """The padding mask, and the layer whose keys tell which of its columns are the prompt's rows (none: the last ones);
    or no mask, and the layers whose attention tells what is padding.

    A mask may be longer than the prompt: models look it up by a key's place, so what comes behind the last key is not
    read, as in one for all rows of a static cache. Where no layer has attention, the last columns are what recurrent
    layers take.

    Raises:
        CannotFill: neither is there, and an input may be a padding mask of another name.
    """
    valid = valid_rows(emit)
    if valid is not None:
        length = shape(valid)[1]
        if same(length, located.rows) or any(parts.grows and same(length, parts.keys) for parts in early):
            return valid, ()
        placed = [parts for parts in early if not parts.grows] or [parts for parts in early if parts.keeps_all]
        if placed:
            return valid, placed[:1]
    telling = _telling(early, own)
    if telling is None and valid is None:
        _check_nothing_is_padded(emit, located, ids)
    return (None, telling) if telling else (valid, ())


def mask_of_rows(mask: torch.Tensor, attention: LayerAttention, rows: IntLike) -> torch.Tensor:
    """The columns [batch, rows] of a padding mask that are the prompt's own rows, as a layer's keys place them."""
    columns, length = attention.columns, mask.shape[1]
    if not isinstance(columns, torch.Tensor):  # the last keys, or the last columns if these are fewer
        own = torch.arange(rows, device=mask.device)  # type: ignore[arg-type] # it may be symbolic
        columns = own + (torch.sym_min(length, attention.keys) - rows)
    return mask.index_select(1, columns[:rows].to(mask.device).clamp(0, length - 1))


def _has_sequences(state: Node, located: Located) -> bool:
    """Whether the split state holds several sequences, each with rows of its own to select.

    Raises:
        CannotFill: it holds them behind the rows.
    """
    if located.row_dim > 0:
        return not same(shape(state)[0], 1)
    if len(shape(state)) > 2 and not same(shape(state)[1], 1):
        raise CannotFill("rows cannot be selected of sequences that lie behind the rows", state, "pass one at a time")
    return False


def _telling(early: Sequence[_Parts], own: _Parts) -> list[_Parts] | None:
    """The layers whose attention tells which rows are padding; None where no layer does.

    Args:
        early: layers below the split whose attention is known.
        own: the layer at the split, whose input is still exact. Its weights are not read: all rows would be computed.
    """
    if early:
        told = {parts.seen_by: parts for parts in early if parts.tells_padding}  # many have one mask in common
        return list(told.values())
    if own.is_known and "weights_of" not in own.nodes:
        return [own] if own.tells_padding else []
    return None


def _check_nothing_is_padded(emit: Emitter, located: Located, ids: Node | None) -> None:
    """Whether no input could say which rows are padding, where neither a mask of a known name nor attention does.

    Raises:
        CannotFill: one could.
    """
    for node in inputs_of(emit.graph):
        value, name = node.meta.get("val"), str(node.meta.get(ARGUMENT, ""))
        is_known = node is ids or node.name == located.tokens.name or "position" in name
        is_parameter = isinstance(node.meta.get("example_value"), torch.nn.Parameter)
        if is_known or is_parameter or not isinstance(value, torch.Tensor) or value.dim() != 2:
            continue
        if same(value.shape[1], located.rows):
            raise CannotFill(
                f"rows are to be kept, and it cannot be told whether input {name or node.name!r} hides some as padding",
                hint="call the padding mask [batch, rows] attention_mask; or, if nothing is padded, pass first_rows=0 "
                "and no rows",
            )


def former_rows(attention: Sequence[LayerAttention], rows: int) -> int:
    """How many rows of former turns a cache holds, where it joins them before the prompt's."""
    lengths = [each.keys for each in attention if each.columns == "last"]
    return lengths[0] - rows if lengths else 0


class _Operands:
    """Nodes that a function is traced on, each once."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def add(self, node: Node) -> int:
        """The node's place among the operands."""
        if node not in self.nodes:
            self.nodes.append(node)
        return self.nodes.index(node)


class _Parts:
    """The nodes that one layer's attention is made of."""

    def __init__(self, copies: Mapping[Node, Node], located: Located, layer: int) -> None:
        self.layer, self.rows = layer, located.rows
        self.nodes: dict[str, Node] = {}
        self.settings: dict[str, Any] = {}
        self.states = located.layers[layer].states
        first, end = located.layers[layer].input, None
        if layer + 1 < len(located.layers):
            end = located.layers[layer + 1].input
        within: list[Node] = []
        node = first.next
        while node is not end and node.op != "output":
            within.append(node)
            node = node.next
        calls = [node for node in within if node.target is ATTENTION]
        if len(calls) == 1:
            self._take_call(calls[0], copies)
        elif not calls and len(found := list(spelled_out(within, self.rows))) == 1:
            self._take_spelled_out(found[0], copies)

    @property
    def tells_padding(self) -> bool:
        """Whether it says which keys its rows see."""
        return "mask" in self.nodes or "weights_of" in self.nodes

    @property
    def seen_by(self) -> tuple[Any, ...]:
        """What says so, and of which columns."""
        of_keys = self.nodes.get("columns", self.settings.get("columns"))
        return (self.nodes.get("mask"), self.nodes.get("weights_of"), of_keys, self.settings["causal"])

    @property
    def keys(self) -> IntLike:
        """How many there are, those of former turns among them."""
        if "weights_of" in self.nodes:
            weights, sinks = self.nodes["weights_of"], int(self.settings["sinks"])
            return shape(weights)[-1] - sinks
        return shape(self.nodes["key"])[-2]

    @property
    def grows(self) -> bool:
        """Whether its keys are those of former turns, if there are any, and then the prompt's."""
        return "columns" not in self.nodes

    @property
    def keeps_all(self) -> bool:
        """Whether it hands on every key, as a sliding window does not."""
        return any(same(size, self.keys) for state in self.states for size in shape(state))

    @property
    def is_known(self) -> bool:
        """Whether the layer has attention whose weights can be told."""
        return bool(self.nodes)

    def _take_call(self, call: Node, copies: Mapping[Node, Node]) -> None:
        given = arguments(call)
        query, key, mask = given["query"], given["key"], given.get("attn_mask")
        if len(shape(query)) != 4 or not self._take_columns(key, -2, copies):
            return
        self.settings |= {"causal": bool(given.get("is_causal", False)), "scale": given.get("scale")}
        self.nodes |= {"query": copies[query], "key": copies[key]}
        if mask is not None:
            self.nodes["mask"] = copies[mask]

    def _take_spelled_out(self, found: SpelledOut, copies: Mapping[Node, Node]) -> None:
        if self._take_columns(found.keys, -1, copies):
            self.settings |= {"causal": False, "scale": None, "sinks": found.sinks}
            self.nodes["weights_of"] = copies[found.weights]

    def _take_columns(self, key: Node, dim: int, copies: Mapping[Node, Node]) -> bool:
        """Whether it is known where the prompt's own rows are among the keys."""
        columns = self._columns(key, dim)
        if isinstance(columns, Node):
            self.nodes["columns"] = copies[columns]
        elif columns is not None:
            self.settings["columns"] = columns
        return columns is not None

    def _columns(self, key: Node, dim: int) -> str | Node | None:
        """Where the prompt's own rows are among the keys, which `dim` counts."""
        keys = shape(key)[dim]
        if same(keys, self.rows):
            return "first"
        while key.target in LAID_OUT:
            assert isinstance(key.args[0], Node)
            key = key.args[0]
        if key.target is aten.cat.default:
            tensors, joined = arguments(key)["tensors"], positive(arguments(key)["dim"], len(shape(key)))
            joins_keys = same(shape(key)[joined], keys) and same(shape(tensors[-1])[joined], self.rows)
            return "last" if joins_keys else None
        if key.target is aten.index_copy.default and same(shape(arguments(key)["index"])[0], self.rows):
            position = arguments(key)["index"]
            assert isinstance(position, Node)
            return position
        return None

    def attention(self, values: Mapping[str, torch.Tensor]) -> LayerAttention:
        """With the values of the nodes."""
        given: dict[str, Any] = {"query": None, "key": None, "mask": None, **self.settings, **values}
        return LayerAttention(layer=self.layer, **given)


def _known_parts(copies: Mapping[Node, Node], located: Located, layers: Iterable[int]) -> list[_Parts]:
    """Of those layers whose attention is known."""
    return [parts for layer in layers if (parts := _Parts(copies, located, layer)).is_known]


def _token_ids(located: Located, copies: Mapping[Node, Node]) -> Node | None:
    """Ids [batch, rows] or [rows] of the prompt; None where the graph begins with embeddings."""
    if located.tokens.target is not aten.embedding.default:
        return None
    ids = arguments(located.tokens)["indices"]
    return copies[ids] if isinstance(ids, Node) and same(shape(ids)[-1], located.rows) else None


def valid_rows(emit: Emitter) -> Node | None:
    """The padding mask [batch, keys] that the model was called with, if it was."""
    for node in inputs_of(emit.graph):
        value = node.meta.get("val")
        named = "attention_mask" in str(node.meta.get(ARGUMENT, ""))
        if named and isinstance(value, torch.Tensor) and value.dim() == 2:
            return node
    return None
