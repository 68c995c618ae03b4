"""One trace of a model, rewritten in several ways and run side by side on the same inputs.

Each way costs only its passes: Dynamo, the slow part, runs once a call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from ridgefill_compile.capture import capture
from ridgefill_compile.errors import CannotFill
from ridgefill_compile.fill import choose_fill
from ridgefill_compile.options import Options
from ridgefill_compile.passes.cuts import cuts_of, widths_of
from ridgefill_compile.passes.experts import expand
from ridgefill_compile.passes.locate import Located, locate
from ridgefill_compile.passes.narrow import narrow
from ridgefill_compile.passes.outputs import check_late_states, check_wanted_rows
from ridgefill_compile.passes.route import Fill, route
from ridgefill_compile.passes.verify import verify
from ridgefill_compile.plan import plan
from ridgefill_compile.recurrences.substitute import substitute_recurrences
from ridgefill_compile.selectors import Selector
from ridgefill_compile.splitmaps import INPUT


class RandomMaps:
    """Maps of random numbers: what they predict is wrong, and the same for every way of computing it."""

    norm: float | None = None

    def __init__(self, located: Located, split: int, cut: str = INPUT) -> None:
        generator = torch.Generator().manual_seed(1)
        d_in = located.layers[split].width
        widths = {layer: sum(each) for layer, each in widths_of(cuts_of(located, split, cut)).items()}
        self.matrices: dict[int, Tensor] = {
            i: torch.randn(d, d_in, generator=generator) / d_in**0.5 for i, d in widths.items()
        }
        self.offsets: dict[int, Tensor] = {i: torch.randn(d, generator=generator) for i, d in widths.items()}

    def matrix(self, layer: int) -> Tensor:
        """[d_out, d_in]"""
        return self.matrices[layer]

    def offset(self, layer: int) -> Tensor:
        """[d_out]"""
        return self.offsets[layer]

    def codes(self, layer: int) -> None:
        """They are stored as they are."""


@dataclass
class Variants:
    """A compile backend that runs the captured graph ("exact") and each rewritten one on every call.

    Attributes:
        ways: name -> (route, whether rows are eliminated).
        selectors: of prefix rows that stay exact.
        first_rows: how many first rows stay so, too.
        cut: what is predicted of late layers, one of `splitmaps.CUTS`.
        verified: whether every graph is verified, which takes longer than all else.
        graphs: name -> rewritten graph, of the last compiled prompt.
        captured, routed, narrowed: what the passes made of that prompt's graph, before it is written out to run.
        results: one entry a call that was a prompt: name -> results of the graph.
        inputs: of the last such call, as they were before it.
        refusals: why prompts were not filled.
        compiled: how many prompt graphs were compiled.
    """

    split: int = 1
    tail: int = 16
    ways: Mapping[str, tuple[str, bool]] = field(
        default_factory=lambda: {
            "oracle": ("oracle", True),
            "routed": ("ridge", False),
            "eliminated": ("ridge", True),
        }
    )
    selectors: tuple[Selector, ...] = ()
    first_rows: int = 0
    cut: str = INPUT
    verified: bool = True
    graphs: dict[str, GraphModule] = field(default_factory=dict)
    captured: GraphModule | None = None
    routed: dict[str, GraphModule] = field(default_factory=dict)
    narrowed: dict[str, GraphModule] = field(default_factory=dict)
    results: list[Mapping[str, Sequence[Tensor]]] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    refusals: list[CannotFill] = field(default_factory=list)
    located: Located | None = None
    compiled: int = 0

    def __call__(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """The backend: rewrites every prompt's graph in all ways, and runs them all when it is called."""
        if not plan(module, Options(route="oracle", split=self.split, tail=self.tail, min_fill=1)).fill:
            return module.forward
        self.compiled += 1
        try:
            graphs = self.rewrite(module)
        except CannotFill as refusal:
            self.refusals.append(refusal)
            return module.forward

        def run(*inputs: Any) -> Any:
            self.answer(graphs, inputs)
            return module.forward(*inputs)

        return run

    def answer(self, graphs: Mapping[str, GraphModule], inputs: Sequence[Any]) -> Mapping[str, Sequence[Tensor]]:
        """Results of every graph, each on copies of the inputs; the last entry of `results` from now on."""
        self.inputs = _copies(inputs)
        copies = {name: _copies(inputs) for name in graphs}
        found = {name: _written(graph(*copies[name]), copies[name]) for name, graph in graphs.items()}
        self.results.append(found)
        return found

    def rewrite(self, module: GraphModule) -> dict[str, GraphModule]:
        """The captured graph of one of Dynamo's, and its rewritten ones, by name."""
        return self.rewritten(capture(module))

    def rewritten(self, captured: GraphModule) -> dict[str, GraphModule]:
        """The captured graph and its rewritten ones, by name."""
        self.captured = captured
        self._verify(captured, None, "capture")
        located = self.located = locate(captured.graph)
        choose_fill(located, Options(route="oracle", split=self.split, tail=self.tail), [])
        check_wanted_rows(captured.graph, located, self.tail)
        check_late_states(captured.graph, located, self.split, self.tail)
        self.graphs = {"exact": expand(captured)}
        for name, (way, eliminated) in self.ways.items():
            maps = RandomMaps(located, self.split, self.cut)
            fill = Fill(way, self.split, self.tail, maps, self.selectors, self.first_rows, cut=self.cut)
            routed = self.routed[name] = route(captured, located, fill)
            self._verify(routed, captured, "route")
            self.narrowed[name] = routed
            if eliminated:
                narrowed = narrow(routed, self._run)
                self.routed[name], self.narrowed[name] = narrowed.whole, narrowed.result
            self.graphs[name] = expand(self.narrowed[name])
        return self.graphs

    def _run(self, name: str, work: Callable[[], Any], before: GraphModule | None = None) -> Any:
        result = work()
        if isinstance(result, GraphModule):
            self._verify(result, before, name)
        return result

    def _verify(self, module: GraphModule, before: GraphModule | None, name: str) -> None:
        if self.verified:
            verify(module, before, name)

    def run(self, model: nn.Module, *calls: Mapping[str, Any]) -> list[Mapping[str, Sequence[Tensor]]]:
        """Call the model, compiled once for all calls, under `no_grad`."""
        torch._dynamo.reset()
        substitute_recurrences(model)
        compiled = torch.compile(model, backend=self)
        with torch.no_grad():
            for call in calls:
                compiled(**call)
        return self.results


def _copies(inputs: Sequence[Any]) -> list[Any]:
    """Inputs that may be written into, apart from the caller's."""
    return [x.clone() if isinstance(x, Tensor) and not isinstance(x, nn.Parameter) else x for x in inputs]


def _written(results: Sequence[Any], inputs: Sequence[Any]) -> list[Tensor]:
    """A graph's results and, behind them, its tensor inputs as it leaves them: static caches are written in place."""
    tensors = [x for x in inputs if isinstance(x, Tensor) and not isinstance(x, nn.Parameter)]
    return [*(r for r in results if isinstance(r, Tensor)), *tensors]
