"""Filled keys or values, made exact: what would be lost if a fill predicted everything but those? For measuring alone.

The exact ones come from an untouched copy of the whole model in the same graph, so nothing is saved.

| splice    | filled rows of every late layer > S that writes keys and values                              |
|-----------|-----------------------------------------------------------------------------------------------|
| keys      | keys are the exact model's                                                                    |
| values    | values are                                                                                    |
| both      | keys and values are: with attention alone, the tail's results are the exact model's           |
| key_norms | keys k become `k |k_exact| / |k|`, of each row and head: the right length, the filled direction |
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from torch.fx import Node

from ridgefill_compile.passes.attention_states import KEY, VALUE, AttentionState, AttentionStates
from ridgefill_compile.passes.filled_states import FilledStates
from ridgefill_compile.passes.inline import inline

SPLICES = {"keys": (KEY,), "values": (VALUE,), "both": (KEY, VALUE), "key_norms": (KEY,)}
"""What can be spliced -> the roles of the states that it changes."""


def splice(filled: FilledStates, states: AttentionStates, what: str, truth: Mapping[Node, Node]) -> None:
    """Replace filled states (or their norms) by the exact model's.

    Args:
        filled: writes the routed graph.
        states: of the layers whose input is predicted.
        what: one of `SPLICES`.
        truth: node of the located graph that holds a state's rows -> the exact model's, in the routed graph.

    Raises:
        CannotFill: see `FilledStates.change`.
    """

    def change(state: AttentionState, prefix: Node) -> Node:
        exact = filled.rows(truth[state.rows], state, 0, -filled.tail)
        if what != "key_norms":
            return exact
        (result,) = inline(filled.emit, partial(at_norms_of, entry_dim=state.entry_dim), [prefix, exact])
        return result

    for state in states.found:
        if state.role in SPLICES[what]:
            filled.change(state, partial(change, state))


def at_norms_of(rows: Tensor, exact: Tensor, entry_dim: int) -> Tensor:
    """Rows [batch, heads, rows, entries], each as long as the exact one; `entry_dim`: what a row is long along."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    have = torch.linalg.vector_norm(rows.to(wide), dim=entry_dim, keepdim=True)
    want = torch.linalg.vector_norm(exact.to(wide), dim=entry_dim, keepdim=True)
    return (rows.to(wide) * torch.where(have > 0, want / have, 1.0)).to(rows.dtype)
