"""Progress on the terminal, always on stderr, so that stdout stays clean for results and JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)


@contextmanager
def progress(title: str, total: int | None = None) -> Iterator[Callable[[], None]]:
    """Show what runs, for how long, and how far it is.

    Args:
        title: what runs, a few words.
        total: how many steps there are; `None` shows a bar that only moves.

    Yields:
        A function to call after each step.
    """
    console = Console(stderr=True)
    columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=30)]
    counted = [MofNCompleteColumn()] if total is not None else []
    with Progress(*columns, *counted, TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)
        bar.update(task, total=total or 1, completed=total or 1)
