"""What became of each compiled graph: `report(model)` says what was filled, and why not where it was not."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.utils.weak import WeakIdKeyDictionary

from ridgefill_compile.cost import layer_pass_ceiling
from ridgefill_compile.selectors import count_of_rows


@dataclass
class GraphReport:
    """One compiled graph.

    Attributes:
        filled: whether prefix rows are filled.
        reason: why not, or what was done.
        hint: what to do about it, where something can be done.
        node: the graph node that stood in the way, if one did.
        route: the route asked for.
        rows: prompt rows the graph was traced with; None where no prompt was found.
        dynamic: whether it serves other row counts too.
        split, tail, layers: of the fill; None where the graph was not analysed.
        first_rows: rows that begin a sequence and are kept exact.
        share: how much of the other prefix rows selectors keep exact.
        kept: prefix rows that are kept exact, those and the ones that selectors choose, at `rows`.
        continues: whether it goes on with a cache of earlier rows, a former turn's, say.
        rows_filled: filled so far, by all runs of the graph; rows of one sequence of a batch.
        multiply_adds_exact, multiply_adds_filled: per run, at `rows` and the traced batch.
        ceiling_layer_passes, ceiling_multiply_adds: the speed-ups these allow.
        pass_seconds: seconds by pass, `capture` included.
        inner_seconds: seconds in the inner compiler.
        blocked: nodes of late layers that run on every row for want of a rule.
        corrected, uncorrected: layers whose filled keys or values were rescaled or spliced, and late layers with states
            that were left alone, and why; empty where no correction was asked for.
        chunk: whether it is for a piece of a prompt, compiled beside a graph of Dynamo's.
        graph_break: where Dynamo stopped tracing, if it did.
    """

    filled: bool = False
    reason: str = ""
    hint: str | None = None
    node: str | None = None
    route: str = "exact"
    rows: int | None = None
    dynamic: bool = False
    split: int | None = None
    tail: int | None = None
    layers: int | None = None
    first_rows: int = 0
    share: float = 0.0
    kept: int = 0
    continues: bool = False
    rows_filled: int = 0
    multiply_adds_exact: int | None = None
    multiply_adds_filled: int | None = None
    ceiling_layer_passes: float | None = None
    ceiling_multiply_adds: float | None = None
    pass_seconds: dict[str, float] = field(default_factory=dict)
    inner_seconds: float = 0.0
    blocked: list[str] = field(default_factory=list)
    corrected: list[str] = field(default_factory=list)
    uncorrected: list[str] = field(default_factory=list)
    chunk: bool = False
    graph_break: str | None = None
    number: int = field(default_factory=itertools.count().__next__)
    formulas: tuple[sympy.Expr, sympy.Expr] | None = field(default=None, repr=False)
    sizes: dict[sympy.Symbol, int] = field(default_factory=dict, repr=False)
    row_symbol: sympy.Symbol | None = field(default=None, repr=False)

    def at(self, rows: int) -> dict[str, float]:
        """Multiply-adds and ceilings of a filled graph at another number of rows.

        Raises:
            ValueError: the graph is not filled, or was compiled for one length only.
        """
        if self.formulas is None or self.tail is None or self.split is None or self.layers is None:
            raise ValueError("the graph is not filled")
        if self.row_symbol is None and rows != self.rows:
            raise ValueError(f"the graph was compiled for {self.rows} rows only")
        sizes = self.sizes if self.row_symbol is None else {**self.sizes, self.row_symbol: rows}
        exact, filled = (int(formula.subs(sizes)) for formula in self.formulas)
        return {
            "multiply_adds_exact": exact,
            "multiply_adds_filled": filled,
            "ceiling_multiply_adds": exact / filled,
            "ceiling_layer_passes": self.layer_passes(rows),
        }

    def kept_of(self, rows: int) -> int:
        """Prefix rows that are kept exact, of so many rows in all."""
        return count_of_rows(self.share, self.first_rows, rows - (self.tail or 0))

    def layer_passes(self, rows: int) -> float:
        """The ceiling by layer passes of so many rows."""
        assert self.split is not None and self.layers is not None
        return layer_pass_ceiling(self.split, self.layers, rows, (self.tail or 0) + self.kept_of(rows))

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, for JSON."""
        hidden = ("formulas", "sizes", "row_symbol")
        return {name: value for name, value in vars(self).items() if name not in hidden}


NOTHING_COMPILED = (
    "no graph of this model was compiled with backend 'ridgefill': either it has not run yet, or it ran uncompiled "
    "(torch.compile(model).generate() runs the uncompiled model; model.compile(backend='ridgefill', ...) is the one "
    "that model.generate() uses)"
)


@dataclass(frozen=True)
class Report:
    """All graphs compiled for one model, in the order they were compiled."""

    graphs: list[GraphReport]

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, for JSON."""
        return {"graphs": [graph.to_dict() for graph in self.graphs]}

    def __str__(self) -> str:
        return "\n".join(_lines(self.graphs)) or NOTHING_COMPILED


def _lines(graphs: Iterable[GraphReport]) -> Iterator[str]:
    earlier = 0
    for number, graph in enumerate(graphs):
        what = "exact" if not graph.filled else "lossless" if graph.route == "lossless" else "filled"
        length = f"{graph.rows} rows" if graph.rows is not None else "no prompt"
        line = f"graph {number}: {what}, {length}{' (any length)' if graph.dynamic else ''}: {graph.reason}"
        if graph.filled and graph.split is not None:
            line += f"; split {graph.split} of {graph.layers}, tail {graph.tail}, route {graph.route}"
            line += f", {graph.kept} rows of the prefix exact" if graph.kept else ""
        if graph.filled:
            line += f"; multiply-adds {graph.multiply_adds_exact:.3g} -> {graph.multiply_adds_filled:.3g}"
        if graph.filled and graph.route != "oracle":
            by_layers = graph.ceiling_layer_passes
            passes = f", by layer passes {by_layers:.2f}x" if by_layers is not None else ""
            line += f" (ceiling {graph.ceiling_multiply_adds:.2f}x{passes})"
        line += f"; passes {sum(graph.pass_seconds.values()):.1f} s, inner compiler {graph.inner_seconds:.1f} s"
        yield line
        if graph.continues and earlier:
            yield f"  cache: it goes on with rows of earlier prompts, of which up to {earlier} are filled"
        earlier += graph.rows_filled
        for label, text in (("at", graph.node), ("do", graph.hint), ("break", graph.graph_break)):
            if text:
                yield f"  {label}: {text}"
        for label, texts in (
            ("on every row", graph.blocked),
            ("corrected", graph.corrected),
            ("left alone", graph.uncorrected),
        ):
            yield from (f"  {label}: {text}" for text in texts)


_reports: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> reports of graphs that read it


def remember(parameters: Iterable[torch.Tensor], graph: GraphReport) -> int:
    """File a report under the parameters its graph reads; it is forgotten when they are.

    Returns:
        How many graphs of Dynamo's there are by now.
    """
    most = 0
    for parameter in parameters:
        filed = _reports.setdefault(parameter, [])
        filed.append(graph)
        most = max(most, sum(not each.chunk for each in filed))
    return most


def report(model: torch.nn.Module) -> Report:
    """What became of every graph compiled with backend "ridgefill" that reads this model's parameters."""
    found: dict[int, GraphReport] = {}
    for parameter in model.parameters():
        for graph in _reports.get(parameter, []):
            found[id(graph)] = graph
    return Report(sorted(found.values(), key=lambda graph: graph.number))
