"""Files that are either whole or not there: write aside, flush to the disk, rename into place."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Give `path` what `write(aside)` writes, in one step.

    A crash, a full disk or an exception at any point leaves `path` as it was; a power cut after the return
    does not undo it.

    Args:
        path: the file to create or replace; its directory must exist.
        write: writes the whole content to the path it is given, in the same directory.
    """
    aside = path.with_name(f".{path.name}.partial")
    try:
        write_flushed(aside, write)
        publish(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def write_flushed(path: Path, write: Callable[[Path], None]) -> None:
    """Run `write(path)` and wait until the content is on the disk."""
    path.touch()
    mode = path.stat().st_mode
    write(path)
    path.chmod(mode)  # safetensors makes files that only their owner may read
    with path.open("rb") as file:
        os.fsync(file.fileno())


def publish(aside: Path, path: Path) -> None:
    """Rename a flushed file over `path`, and wait until the renaming is on the disk."""
    aside.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
