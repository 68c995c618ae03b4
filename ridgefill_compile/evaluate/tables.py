"""Tables for people, of what the JSON says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

LABELS = {"none": "no fill", "identity": "identity", "ridge": "ridge"}


def arm_table(arms: Mapping[str, Mapping[str, Any]]) -> Table:
    """What each arm loses.

    Args:
        arms: arm -> `ArmSummary.to_dict()`.
    """
    table = Table("arm", "loss over exact (nat)", "same next token (%)", "KL mean", "KL median")
    for arm, figures in arms.items():
        table.add_row(LABELS.get(arm, arm), *arm_cells(figures))
    return table


def arm_cells(figures: Mapping[str, Any]) -> list[str]:
    """Loss, agreement, mean and median divergence of one arm, each with its interval."""
    percent = [None if value is None else 100 * value for value in figures["top1_agreement"]]
    return [
        interval(figures["delta_nll"]),
        interval(percent, 1),
        interval(figures["kl_mean"]),
        interval(figures["kl_median"], 4),
    ]


def interval(figure: Sequence[float | None], digits: int = 3) -> str:
    """`value [low, high]`, without the ends where there are none."""
    value, low, high = (None if each is None else f"{each:.{digits}f}" for each in figure)
    return f"{value}" if low is None else f"{value} [{low}, {high}]"
