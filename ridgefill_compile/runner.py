"""Runs passes one by one: times each, checks its result if asked, writes the graph before and after if asked."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule, Node

from ridgefill_compile.errors import OptionError
from ridgefill_compile.options import Options
from ridgefill_compile.passes.demand import Demands, analyse
from ridgefill_compile.passes.verify import verify

Result = TypeVar("Result")
_graphs = itertools.count()


class PassRunner:
    """Called with a pass's name and the pass; keeps its seconds in `seconds[name]`."""

    def __init__(self, options: Options, seconds: dict[str, float]) -> None:
        self.options = options
        self.seconds = seconds
        self.folder: Path | None = None
        if options.dump is not None:
            self.folder = Path(options.dump) / f"graph-{next(_graphs):03d}"
        self.written = 0

    def __call__(self, name: str, work: Callable[[], Result], before: GraphModule | None = None) -> Result:
        """Run one pass. `before`: the graph it rewrites, where it rewrites one."""
        started = time.perf_counter()
        result = work()
        self.seconds[name] = time.perf_counter() - started
        if isinstance(result, GraphModule):
            if self.options.verify:
                verify(result, before, name)
            if before is not None:
                self.dump(f"{name}.before", before)
            self.dump(f"{name}.after", result)
        return result

    def dump(self, name: str, module: GraphModule) -> None:
        """Write a graph as text: `NN.pass.before.txt` and `NN.pass.after.txt`."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"{self.written:02d}.{name}.txt").write_text(readable(module))
        except OSError as error:
            raise OptionError(f"option 'dump': cannot write there: {error}") from error
        self.written += 1


def readable(module: GraphModule, demands: Demands | None = None) -> str:
    """A graph as text: a line per node with its type, the rows of it that are read, its call and its module.

    linear_9: f32[1, 4096, 576], read: last 512 of dim 1  = aten.linear.default(mul_12, w)  # model.layers.3.q_proj
    """
    demands = demands or analyse(module.graph)
    return "\n".join(_line(node, demands) for node in module.graph.nodes) + "\n"


def _line(node: Node, demands: Demands) -> str:
    if node.op == "output":
        return f"return {node.args[0]}"
    asked = demands.calls.get(node)
    read = "whole" if asked is None else str(_rows_of(node, demands))
    if node not in demands.of:
        read = "nothing"
    arguments = ", ".join([*map(str, node.args), *(f"{k}={v}" for k, v in node.kwargs.items())])
    call = node.op if node.op == "placeholder" else f"{node.target}({arguments})"
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    where = f"  # {stack[-1][0]}" if stack else ""
    return f"{node.name}: {_kind(node.meta.get('val'))}, read: {read}  = {call}{where}"


def _rows_of(node: Node, demands: Demands) -> Any:
    return demands.on(node)


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_kind, value))})"
    return str(value)
