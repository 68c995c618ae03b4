"""Verdicts as a table and a line of counts, for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from ridgefill_compile.zoo.check import Verdict


def state_of(verdict: Verdict) -> str:
    """In one word: unsound, exact (sound, not filled), filled (on more rows than need be) or eliminated."""
    if not verdict.sound:
        return "unsound"
    return "exact" if not verdict.filled else "eliminated" if verdict.eliminated else "filled"


COLOURS = {"unsound": "red", "exact": "yellow", "filled": "cyan", "eliminated": "green"}


def verdict_table(verdicts: Sequence[Verdict]) -> Table:
    """One row a model: what became of it, and why no more."""
    table = Table("type", "state", "layers", "gain", "graphs", "s", "why")
    for verdict in verdicts:
        state = state_of(verdict)
        why = verdict.reason or "; ".join(verdict.blocked_by if state == "filled" else [])
        table.add_row(
            verdict.type,
            f"[{COLOURS[state]}]{state}[/]",
            f"{verdict.filled_layers} of {verdict.layer_count}",
            "" if verdict.gain is None else f"{verdict.gain:.2f}x",
            str(verdict.graphs),
            f"{verdict.seconds:.0f}",
            escape(why),
        )
    return table


def counts(verdicts: Sequence[Verdict]) -> str:
    """How many are sound, filled, eliminated, exact and unsound."""
    sound = [verdict for verdict in verdicts if verdict.sound]
    filled = [verdict for verdict in sound if verdict.filled]
    eliminated = sum(bool(verdict.eliminated) for verdict in filled)
    return (
        f"{len(verdicts)} types: {len(sound)} sound, of which {len(filled)} filled ({eliminated} of them with no more "
        f"multiply-adds than need be) and {len(sound) - len(filled)} exact with a reason; "
        f"{len(verdicts) - len(sound)} unsound"
    )


def verdict_lines(verdict: Verdict) -> list[str]:
    """One model's verdict, a line each for what is to be said."""
    lines = [f"checked: {state_of(verdict)}, {verdict.filled_layers} of {verdict.layer_count} layers"]
    lines += [f"{kind}: {outcome}" for kind, outcome in verdict.calls.items()]
    lines += [f"runs on more rows than are read: {op}" for op in verdict.blocked_by]
    return [*lines, *verdict.notes, *([f"why: {verdict.reason}"] if verdict.reason else [])]
