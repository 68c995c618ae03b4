"""One late layer, drawn: every value coloured by the rows it is computed on."""

from __future__ import annotations

from pathlib import Path

import networkx as nx

from ridgefill_compile.errors import OptionError
from ridgefill_compile.inspection import Inspection, ValueFacts

COLOURS = {"all": "#c8553d", "tail": "#2f6f9f", "none": "#b8b8b8"}
WORK = ("linear", "attention", "addmm", ".mm", "bmm", "matmul", "conv")  # ops that are drawn large, with their module


def check_picture(path: Path) -> None:
    """Look whether a picture can be written, before it takes time to make it.

    Raises:
        OptionError: no such folder, or no format of that name.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in formats:
        raise OptionError(
            f"a picture's name must end in one of {', '.join('.' + name for name in sorted(formats))}: {path}"
        )
    if not path.parent.is_dir():
        raise OptionError(f"there is no folder {path.parent} to write a picture into")


def draw_late_layer(inspection: Inspection, path: str | Path) -> Path:
    """Write a picture of `inspection.late_layer`: data flows down; red on all rows, blue on the tail, grey on none.

    Args:
        inspection: what `inspect_model` found, with a layer that would be filled.
        path: file to write; its suffix chooses the format (.png, .svg, .pdf).

    Raises:
        ValueError: nothing would be filled, so there is nothing to draw.
    """
    if not inspection.values:
        raise ValueError(f"nothing would be filled: {inspection.reason}")
    from matplotlib.figure import Figure  # slow to import, wanted here only
    from matplotlib.lines import Line2D

    flow: nx.DiGraph[str] = nx.DiGraph()
    for value in inspection.values:
        flow.add_node(value.name)
        flow.add_edges_from((source, value.name) for source in value.reads)
    place = _places(flow)
    depth = max(-y for _, y in place.values())
    figure = Figure(figsize=(11, 2.5 + 0.42 * depth), layout="constrained")
    axes = figure.subplots()
    nx.draw_networkx_edges(
        flow,
        place,
        ax=axes,
        edge_color="#999999",
        width=0.7,
        arrowsize=7,
        node_size=60,
        connectionstyle="arc3,rad=0.05",
    )
    for value in inspection.values:
        x, y = place[value.name]
        large = any(word in value.op for word in WORK)
        axes.scatter([x], [y], s=130 if large else 22, color=COLOURS[_colour(value)], zorder=3)
        label = value.module.rsplit(".", 1)[-1] if "linear" in value.op else _short(value.op)
        axes.annotate(label, (x, y), (6, 3), textcoords="offset points", fontsize=9 if large else 6, zorder=4)
    handles = [
        Line2D([], [], marker="o", linestyle="", color=COLOURS["all"], label=f"all {inspection.rows} rows"),
        Line2D(
            [], [], marker="o", linestyle="", color=COLOURS["tail"], label=f"the last {inspection.tail} rows or fewer"
        ),
        Line2D([], [], marker="o", linestyle="", color=COLOURS["none"], label="no row: removed"),
    ]
    axes.legend(handles=handles, loc="lower left", fontsize=9)
    axes.set_title(
        f"Layer {inspection.late_layer} of {len(inspection.layers)}, split {inspection.split}: rows computed"
    )
    axes.margins(x=0.15)
    axes.axis("off")
    target = Path(path)
    figure.savefig(target, dpi=130)
    return target


def _colour(value: ValueFacts) -> str:
    return value.rows if value.rows in ("all", "none") else "tail"


def _places(flow: nx.DiGraph[str]) -> dict[str, tuple[float, float]]:
    """Depth by the longest way from the layer's input; across, each value near what it reads."""
    place: dict[str, tuple[float, float]] = {}
    for depth, generation in enumerate(nx.topological_generations(flow)):
        wished = []
        for name in generation:
            above = [place[source][0] for source in flow.predecessors(name)]
            wished.append((sum(above) / len(above) if above else 0.0, name))
        taken: list[float] = []
        for x, name in sorted(wished):
            x = max(x, taken[-1] + 1.0) if taken else x
            taken.append(x)
            place[name] = (x, -float(depth))
        shift = (sum(taken) - sum(x for x, _ in wished)) / len(taken)
        for _, name in wished:
            place[name] = (place[name][0] - shift, place[name][1])
    return place


def _short(op: str) -> str:
    """`add` of `aten.add.Tensor`; other functions whole."""
    parts = op.split(".")
    return parts[1] if len(parts) > 1 else op
