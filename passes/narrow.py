"""From a graph that computes every row to one that computes those that are read: unfuse, demand, eliminate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from ridgefill_compile.passes.demand import Demands, analyse
from ridgefill_compile.passes.eliminate import eliminate
from ridgefill_compile.passes.unfuse import unfuse


@dataclass(frozen=True)
class Narrowed:
    """The graph with projections apart, which of its rows are read, and the graph of these rows."""

    whole: GraphModule
    demands: Demands
    result: GraphModule


def _at_once(name: str, work: Callable[[], Any], before: GraphModule | None = None) -> Any:
    return work()


def narrow(module: GraphModule, run: Callable[..., Any] = _at_once) -> Narrowed:
    """Leave out what nobody reads.

    Args:
        module: a captured or routed graph.
        run: called with each pass's name, the pass, and the graph it rewrites, if it does; gives what the pass gives.
    """
    whole = run("unfuse", lambda: unfuse(module), module)
    demands = run("demand", lambda: analyse(whole.graph))
    return Narrowed(whole, demands, run("eliminate", lambda: eliminate(whole, demands), whole))
