"""Tables for people, of what the JSON says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

LABELS = {"none": "no fill", "identity": "identity", "ridge": "ridge"}


def arm_table(arms: Mapping[str, Mapping[str, Any]]) -> Table:
    """What each arm loses.

    Args:
        arms: arm -> `ArmSummary.to_dict()`.
    """
    table = Table("arm", "loss over exact (nat)", "95 % interval", "same next token", "KL mean", "KL median")
    for arm, figures in arms.items():
        value, low, high = figures["delta_nll"]
        table.add_row(
            LABELS.get(arm, arm),
            f"{value:.3f}",
            "" if low is None else f"{low:.3f} to {high:.3f}",
            f"{100 * figures['top1_agreement'][0]:.1f} %",
            f"{figures['kl_mean'][0]:.3f}",
            f"{figures['kl_median'][0]:.4f}",
        )
    return table
