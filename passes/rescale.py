"""Filled values (or keys) as long as exact ones: the first tail rows are computed twice, and lengths are compared.

A linear map predicts a mean, and means are shorter than what they are means of. How much shorter shows on the first c
rows of the tail, which have both a true input x_l and a prediction A_l x_S + b_l (per sequence and head h):

    m_h = mean over the first c tail rows of |v_h(x_l)| / |v_h(A_l x_S + b_l)|         [B, H, 1, 1]
    v~  = m v  on filled rows; v on the tail and on rows selected to stay exact

The predicted side is a second copy of the nodes between the layer's input and its state. It is written on every row, of
which only those c and the prompt's last are read: the rest is for `eliminate`.

Of a prompt in pieces this is done in the chunk that the tail begins in, whose tail rows those are; earlier chunks' rows
are rescaled in the cache.

Padding needs no care: where it reaches into the tail, all filled rows of that sequence are padding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.fx import Node

from ridgefill_compile.passes.attention_states import AttentionState, AttentionStates
from ridgefill_compile.passes.calls import TO_THE_END, aten, shape
from ridgefill_compile.passes.chunk_inputs import measured_rows
from ridgefill_compile.passes.demand import SELECTION
from ridgefill_compile.passes.emit import Emitter
from ridgefill_compile.passes.filled_states import FilledStates
from ridgefill_compile.passes.inline import inline
from ridgefill_compile.passes.selected_rows import take_rows


def rescale(
    filled: FilledStates,
    states: AttentionStates,
    counts: Mapping[str, int],
    predict: Callable[[int], Mapping[Node, Node]],
) -> None:
    """Bring filled states to the length of exact ones.

    Args:
        filled: writes the routed graph.
        states: of the layers whose input is predicted.
        counts: role -> c, at most the tail; 0: left as they are.
        predict: adds what is predicted of a layer, its input or projections, as predicted on every row, at the insert
            point: node of the routed graph that is predicted on prefix rows alone -> the new one.

    Raises:
        CannotFill: see `FilledStates.change`.
    """
    devices = {filled.copies[state.rows].meta["val"].device for state in states.found}
    with filled.emit.graph.inserting_before(filled.split_state.next):  # once: they share nodes
        taking = {count: _TailRows(filled, count, devices) for count in sorted(set(counts.values()) - {0})}
    twins: dict[tuple[int, int], dict[Node, Node]] = {}  # by layer and count: what is read on other rows is not shared

    def multiplier(state: AttentionState, count: int, value: Node) -> Node:
        known = twins.setdefault((state.layer, count), {})
        if not known:
            known.update(predict(state.layer))
        predicted = taking[count].of_prediction(recomputed(value, known), state)
        exact = taking[count].of_state(value, state)
        ratio = partial(length_ratio, row_dim=state.row_dim, entry_dim=state.entry_dim)
        (result,) = inline(filled.emit, ratio, [exact, predicted])
        return result

    def scale(of_state: Callable[[], Node], rows: Node) -> Node:
        (result,) = inline(filled.emit, times, [rows, of_state()])
        return result

    for state in states.found:
        count = counts[state.role]
        if count:
            of_state = functools.cache(partial(multiplier, state, count, filled.copies[state.rows]))
            filled.change(state, partial(scale, of_state))


def length_ratio(exact: Tensor, predicted: Tensor, row_dim: int, entry_dim: int) -> Tensor:
    """Mean over rows of `|exact| / |predicted|`, at least float32, e.g. [batch, heads, 1, 1].

    Args:
        exact: e.g. [batch, heads, c, entries].
        predicted: the same rows, from predicted inputs.
        row_dim: dimension that counts rows.
        entry_dim: dimension that counts a head's entries.
    """
    wide = torch.promote_types(exact.dtype, torch.float32)
    have = torch.linalg.vector_norm(predicted.to(wide), dim=entry_dim, keepdim=True)
    want = torch.linalg.vector_norm(exact.to(wide), dim=entry_dim, keepdim=True)
    return torch.where(have > 0, want / have, 1.0).mean(row_dim, keepdim=True)


def times(rows: Tensor, multiplier: Tensor) -> Tensor:
    """Filled rows, e.g. [batch, heads, rows, entries], times what `length_ratio` gives."""
    return (rows.to(multiplier.dtype) * multiplier).to(rows.dtype)


def recomputed(value: Node, copies: dict[Node, Node]) -> Node:
    """A second copy of what makes a value of others, at the insert point.

    Args:
        value: depends on one that `copies` knows another of.
        copies: node -> what to read in its place; grows, so that values of the same others share copies.
    """
    behind, node = set(copies), min(copies)
    while node is not value:
        node = node.next
        if not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    needed, ahead = {value}, [value]
    while ahead:
        more = behind.intersection(ahead.pop().all_input_nodes) - needed - copies.keys()
        needed |= more
        ahead += more
    for node in sorted(needed - copies.keys()):
        copies[node] = value.graph.node_copy(node, lambda operand: copies.get(operand, operand))
    return copies[value]


class _TailRows:
    """The first `count` rows of the tail."""

    def __init__(self, filled: FilledStates, count: int, devices: Iterable[torch.device]) -> None:
        self.filled, self.count = filled, count
        self.index: dict[torch.device, Node] = {}  # their positions: a model may be spread over devices
        self.in_chunk = filled.given.get(measured_rows(count))
        if self.in_chunk is None and count < filled.tail:
            rows = shape(filled.split_state)[filled.row_dim]
            first = filled.emit.minus(filled.emit.size(rows), filled.tail)
            self.index = {device: _positions(filled.emit, count, first, device) for device in devices}

    def of_state(self, value: Node, state: AttentionState) -> Node:
        """Of a value that is computed on every row."""
        if self.in_chunk is not None:
            return self.filled.emit(take_rows, value, self.in_chunk, state.row_dim, None, like=value)
        end = self.count - self.filled.tail or TO_THE_END
        return self.filled.rows(value, state, -self.filled.tail, end)

    def of_prediction(self, value: Node, state: AttentionState) -> Node:
        """Of a value that nobody else reads: taken as selected rows, it is computed on them and the last row alone."""
        index = self.in_chunk or self.index.get(value.meta["val"].device)
        if index is None:
            return self.of_state(value, state)
        taken = self.filled.emit(take_rows, value, index, state.row_dim, None, like=value)
        taken.meta[SELECTION] = 1
        return taken


def _positions(emit: Emitter, count: int, first: int | Node, device: torch.device) -> Node:
    """Positions `first`, `first + 1`, ..., int64 [count]."""
    return emit(aten.add.Tensor, emit(aten.arange.default, count, device=device, pin_memory=False), first)
