"""What the graph of a piece of a prompt is told beside the model's inputs: which of its rows stay exact, and where the
prompt's tail begins. These are further inputs, behind the others, in the order of `names`.

| input               | holds                                                                                   |
|---------------------|-----------------------------------------------------------------------------------------|
| `exact_rows`        | positions of exact rows but the last one, which always is: int64 [count]                |
| `measured_rows_<c>` | positions of the tail's first c rows, or of as many as there are: int64 [c or fewer]    |
| `filled_before`     | of each row of the prompt before the chunk, whether it is filled: int64 [rows]          |
| `scanned_rows`      | positions of the rows before the correction of a state: int64 [P]; its length says all  |

The last three are for corrections, in the one chunk that the tail begins in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

from ridgefill_compile.passes.emit import Emitter, inputs_of

EXACT, BEFORE, SCANNED = "exact_rows", "filled_before", "scanned_rows"

SOME = {EXACT: 97, SCANNED: 3}
"""Lengths when a graph is traced: numbers that no size has by chance, and no more scanned rows than a chunk has."""


@dataclass(frozen=True)
class ChunkInputs:
    """Which further inputs a chunk's graph has.

    Attributes:
        measured: how many of the tail's first rows are measured, for each correction of lengths; none if empty.
        scanned: whether states are corrected behind some rows of the chunk.
        at_start: whether states are corrected before its first row.
    """

    measured: tuple[int, ...] = ()
    scanned: bool = False
    at_start: bool = False

    @property
    def names(self) -> list[str]:
        """Names of the inputs, in order."""
        measured = [measured_rows(count) for count in self.measured]
        before = [BEFORE] if measured or self.scanned or self.at_start else []
        return [EXACT, *measured, *before, *([SCANNED] if self.scanned else [])]

    def add(self, graph: Graph, emit: Emitter, device: torch.device) -> dict[str, Node]:
        """Add the inputs to a graph: name -> node."""
        found = {}
        for place, name in enumerate(self.names):
            with graph.inserting_after(inputs_of(graph)[-1]):
                node = found[name] = graph.placeholder(name)
            context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext([DimDynamic.DYNAMIC])
            positions = torch.arange(SOME.get(name, 79 + 4 * place), device=device)
            source = ConstantSource(f"ridgefill_{name}")
            node.meta["val"] = emit.mode.from_tensor(positions, source=source, symbolic_context=context)
        return found

    def values(self, rows: ChunkRows, device: torch.device) -> list[Tensor]:
        """The inputs of one chunk."""
        # A symbolic size is at least 2. What comes before the prompt is not filled by it; and what has no row before it
        # has no state to correct.
        before = [0] * (2 - len(rows.filled_before)) + list(map(int, rows.filled_before))
        known: dict[str, Sequence[int]] = {EXACT: rows.exact, BEFORE: before, SCANNED: range(rows.scanned)}
        for count in self.measured:
            some = range(rows.filled, min(rows.filled + count, rows.count))
            known[measured_rows(count)] = some if len(some) > 1 else [*some, *some]
        return [torch.tensor(list(known[name]), dtype=torch.int64, device=device) for name in self.names]


@dataclass(frozen=True)
class ChunkRows:
    """The rows of one chunk: how many there are, of which the first `filled` are before the prompt's tail; which of
    all stay exact; which of the prompt's rows before the chunk are filled; and how many of the chunk's own are scanned
    before states are corrected.
    """

    count: int
    filled: int
    exact: Sequence[int]
    filled_before: Sequence[bool] = ()
    scanned: int = 0


def measured_rows(count: int) -> str:
    """Name of the input with the positions of the tail's first rows."""
    return f"measured_rows_{count}"
