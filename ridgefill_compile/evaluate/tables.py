"""Tables for people, of what the JSON says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from ridgefill_compile.evaluate.arms import CORRECTED, LONGER_TAIL
from ridgefill_compile.inspection import Inspection

LABELS = {
    "none": "no fill",
    LONGER_TAIL: "no fill, tail of equal cost",
    "identity": "identity",
    "ridge": "ridge",
    CORRECTED: "ridge, states corrected",
}


def arm_table(arms: Mapping[str, Mapping[str, Any]]) -> Table:
    """What each arm loses.

    Args:
        arms: arm -> `ArmSummary.to_dict()`.
    """
    table = figure_table("arm")
    for arm, figures in arms.items():
        table.add_row(LABELS.get(arm, arm), *arm_cells(figures))
    return table


def figure_table(*keys: str) -> Table:
    """An empty table: columns that say whose figures a row holds, then those of `arm_cells`."""
    figures = ("loss over exact (nat)", "same token (%)", "KL mean", "KL median")
    return Table(*keys, *figures, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)


def arm_cells(figures: Mapping[str, Any]) -> list[str]:
    """Loss and agreement of one arm with their intervals, mean and median divergence without, to fit a line."""
    percent = [None if value is None else 100 * value for value in figures["top1_agreement"]]
    return [
        interval(figures["delta_nll"]),
        interval(percent, 1),
        interval(figures["kl_mean"][:1]),
        interval(figures["kl_median"][:1], 4),
    ]


def interval(figure: Sequence[float | None], digits: int = 3) -> str:
    """`value [low, high]`, without the ends where there are none."""
    value, *ends = (f"{each:.{digits}f}" for each in figure if each is not None)
    return f"{value} [{', '.join(ends)}]" if ends else value


def inspection_tables(found: Inspection) -> Iterator[Table | str]:
    """What `inspect_model` found: layers, the values of one late layer, multiply-adds, and what stands in the way."""
    layers = Table("layer", "module", "kind", "prefix reads, width", "state writes", title="layers that write states")
    for layer in found.layers:
        predicted = "split state" if layer.index == found.split else "layer input" if layer.late else "exact"
        shapes = Counter(state.split(" ", 1)[1] for state in layer.states)
        states = ", ".join(f"{count} x {shape}" for shape, count in shapes.items())
        layers.add_row(str(layer.index), layer.module, layer.kind, f"{predicted}, {layer.width}", escape(states))
    yield layers
    if found.values:
        values = Table("rows", "op", "shape", "module", title=f"values of layer {found.late_layer} when filled")
        for value in found.values:
            colour = {"all": "red", "none": "dim"}.get(value.rows, "blue")
            shape = f"[{', '.join(value.shape)}]"
            values.add_row(
                f"[{colour}]{value.rows}[/]", value.op, escape(shape), ".".join(value.module.split(".")[-2:])
            )
        yield values
    if found.multiply_adds_exact and found.multiply_adds_filled:
        yield (
            f"split {found.split} of {len(found.layers)}, {found.rows} rows, tail {found.tail}: multiply-adds "
            f"{found.multiply_adds_exact:.4g} exact, {found.multiply_adds_filled:.4g} filled; ceilings "
            f"{found.ceiling_multiply_adds:.2f}x by multiply-adds, {found.ceiling_layer_passes:.2f}x by layer passes"
        )
    for blocked in found.blocked:
        yield escape(f"runs on every row, for want of a row rule: {blocked}")
    if found.reason:
        yield escape(" | ".join(text for text in (f"not filled: {found.reason}", found.node, found.hint) if text))
