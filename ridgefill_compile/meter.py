"""The progress bar of a calibration: documents, rows a second, then the layers being solved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from ridgefill_compile.documents import Document


class Meter:
    """A context manager that shows a progress bar on stderr, so that stdout stays clean for results.

    Args:
        show: False shows nothing.
        items: how many texts or batches there are, if that is known.
    """

    def __init__(self, show: bool, items: int | None) -> None:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), disable=not show)
        self._reading = self._progress.add_task("calibrating", total=items, speed="")
        self._rows = 0

    def __enter__(self) -> Meter:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def read(self, document: Document) -> None:
        """A document is done."""
        self._progress.update(self._reading, completed=document.item + 1)

    def add_rows(self, rows: int) -> None:
        """So many rows more went through the model."""
        self._rows += rows
        elapsed = self._progress.tasks[self._reading].elapsed
        if elapsed:
            self._progress.update(self._reading, speed=f"{self._rows / elapsed:,.0f} rows/s")

    def layers(self, split: int, layers: Sequence[int]) -> Iterator[int]:
        """The layers in turn, each shown as done when the next is asked for."""
        task = self._progress.add_task(f"solving split {split}", total=len(layers), speed="")
        for layer in layers:
            yield layer
            self._progress.advance(task)
