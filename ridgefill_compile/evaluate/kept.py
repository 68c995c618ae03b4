"""Results on disk, a file each, so that an interrupted measurement goes on where it stopped."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ridgefill_compile.atomic import replace_file


def digest_of(*parts: Any) -> str:
    """16 hexadecimal digits of what a result depends on: tensors by their values, anything else as it is shown."""
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            found.update((part.float() if part.is_floating_point() else part).numpy().tobytes())
        else:
            found.update(repr(part).encode())
    return found.hexdigest()[:16]


class Kept:
    """Results in a folder, by name.

    Args:
        folder: made if need be; its name says all that the results depend on besides their own.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str) -> Any:
        """What was put, or None."""
        file = self.folder / f"{name}.pt"
        return torch.load(file, weights_only=True) if file.exists() else None

    def put(self, name: str, value: Any) -> None:
        """Keep tensors and plain values; all of it or nothing, whatever happens meanwhile."""
        replace_file(self.folder / f"{name}.pt", lambda aside: torch.save(value, aside))
