"""The demo's figures as one picture: what each arm loses, and the speed-up against what arithmetic allows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ridgefill_compile.evaluate.tables import LABELS

COLOURS = {
    "none": "#999999",
    "identity": "#e69f00",
    "ridge": "#0072b2",
    "exact": "#999999",
    "filled": "#0072b2",
}
CEILING = "#d55e00"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write the picture of a demo's result.

    Args:
        result: what `ridgefill demo --json` prints.
        path: file to write; its ending chooses the format.
    """
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    loss, speed = figure.subplots(1, 2, width_ratios=(1, 1.2))
    draw_arms(loss, result)
    draw_speed(speed, result)
    figure.suptitle(
        f"{result['model']}: layers {result['split']} to {result['layers'] - 1} run on the last "
        f"{result['tail']} rows only",
        fontsize=12,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def draw_arms(axes: Axes, result: Mapping[str, Any]) -> None:
    """Loss of each arm over the exact model on novel tokens, with intervals."""
    arms = list(result["delta_nll"])
    values = [result["delta_nll"][arm] for arm in arms]
    intervals = [result["delta_nll_interval"][arm] for arm in arms]
    tops = []
    for place, (arm, value, (low, high)) in enumerate(zip(arms, values, intervals, strict=True)):
        axes.bar(place, value, color=COLOURS.get(arm, "#56b4e9"), width=0.62)
        if low is not None and high is not None:
            axes.errorbar(place, value, [[max(0, value - low)], [max(0, high - value)]], color="black", capsize=4)
        tops.append(max(value, value if high is None else high))
        axes.annotate(f"{value:.2f}", (place, tops[-1]), (0, 4), textcoords="offset points", ha="center")
    axes.set_xticks(range(len(arms)), [LABELS.get(arm, arm) for arm in arms])
    axes.set_ylim(min(0.0, *values) * 1.2, max(*tops, 1e-3) * 1.15)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_ylabel("loss over the exact model (nat)")
    axes.set_title(
        f"Novel tokens of {result['held_out_windows']} held-out texts, {result['held_out_rows']} rows each\n"
        f"same next token as exact: {100 * result['top1_agreement']:.0f} % (ridge)",
        fontsize=10,
    )
    plain(axes)


def draw_speed(axes: Axes, result: Mapping[str, Any]) -> None:
    """Time to first token of both models, and the speed-up beside its two ceilings."""
    exact, filled = result["ttft_exact_s"], result["ttft_filled_s"]
    for place, (name, value) in enumerate((("exact", exact), ("filled", filled))):
        axes.barh(place, value, color=COLOURS[name], height=0.5)
        axes.annotate(
            f"{value:.2f} s",
            (0, place),
            (8, 0),
            textcoords="offset points",
            va="center",
            color="white",
            fontweight="bold",
        )
    marks = (
        ("ceiling_multiply_adds", "-", "by multiply-adds"),
        ("ceiling_layer_passes", ":", "by layer passes"),
    )
    for key, style, label in marks:
        axes.plot(
            [exact / result[key]] * 2,
            [0.6, 1.4],
            style,
            color=CEILING,
            linewidth=2,
            label=f"ceiling {label}: {result[key]:.2f}x",
        )
    axes.set_yticks([0, 1], ["exact", "filled"])
    axes.invert_yaxis()
    axes.set_ylim(1.9, -0.5)
    axes.set_xlabel("time to first token (s), median")
    axes.set_title(
        f"{result['rows']} prompt rows: first token {result['speedup']:.2f}x sooner\n{result['machine']}",
        fontsize=10,
    )
    axes.legend(loc="lower right", frameon=False, fontsize=9)
    plain(axes)


def plain(axes: Axes) -> None:
    """No box around the plot."""
    axes.spines[["top", "right"]].set_visible(False)
