"""Corrections of filled states, in the graph that a route wrote: lengths of values and keys, or splices to measure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch.fx import Node

from ridgefill_compile.passes.attention_states import KEY, VALUE, AttentionStates
from ridgefill_compile.passes.filled_states import FilledStates
from ridgefill_compile.passes.rescale import rescale
from ridgefill_compile.passes.splice import SPLICES, splice


@dataclass(frozen=True)
class Correction:
    """What is done to filled states: see the options of these names. Falsy if nothing is."""

    value_rescale: int = 0
    key_rescale: int = 0
    splice: str | None = None

    def __bool__(self) -> bool:
        return self != Correction()

    def told(self, states: AttentionStates) -> tuple[list[str], list[str]]:
        """Which layers are corrected and how, and which are left alone and why."""
        counts = {VALUE: self.value_rescale, KEY: self.key_rescale}
        done = {f"{role}s rescaled": [s.layer for s in states.of(role)] for role, count in counts.items() if count}
        if self.splice is not None:
            changed = {s.layer for role in SPLICES[self.splice] for s in states.of(role)}
            done[f"{self.splice} spliced"] = sorted(changed)
        left: dict[str, list[int]] = {}
        for layer, reason in states.left_alone.items():
            left.setdefault(reason, []).append(layer)
        return layer_lines(done), layer_lines(left)


def layer_lines(layers: Mapping[str, Iterable[int]]) -> list[str]:
    """A line for each thing that is said of some layers."""
    return [f"{what}: layers {', '.join(map(str, where))}" for what, where in layers.items() if where]


def correct(
    filled: FilledStates,
    states: AttentionStates,
    correction: Correction,
    predict: Callable[[int], Mapping[Node, Node]],
    truth: Mapping[Node, Node],
) -> None:
    """Correct filled states: lengths first, then splices.

    Args:
        filled: see `rescale`.
        states: see `rescale`.
        correction: what to do.
        predict: see `rescale`.
        truth: node of the routed graph -> the exact model's; read by splices alone.

    Raises:
        CannotFill: rows are selected that a state cannot keep apart.
    """
    counts = {VALUE: correction.value_rescale, KEY: correction.key_rescale}
    exact = {state.rows: truth[filled.copies[state.rows]] for state in states.found} if correction.splice else {}
    rescale(filled, states, counts, predict)
    if correction.splice is not None:
        splice(filled, states, correction.splice, exact)
