"""The state of a calibration on disk, so that an interrupted one goes on where it was."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ridgefill_compile.atomic import replace_file
from ridgefill_compile.errors import CalibrationError, OptionError
from ridgefill_compile.ridge import RidgeStatistics

FILE = "calibration.safetensors"
_VERSION = 2


@dataclass
class SumsSoFar:
    """What has been summed.

    Attributes:
        documents: documents whose every window is in the sums.
        digest: chained hash of the token ids read up to there.
        by_split: split -> its sums; empty before the first document.
    """

    documents: int
    digest: str
    by_split: dict[int, RidgeStatistics]


class Checkpoint:
    """One file that holds the sums, replaced in one step after each document.

    Args:
        directory: where the file goes; made if need be.
        settings: all that the sums depend on besides the texts; JSON values. Sums of other settings are
        refused.
    """

    def __init__(self, directory: str | Path, settings: Mapping[str, Any]) -> None:
        self.path = Path(directory) / FILE
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(f"the checkpoint's directory cannot be made: {error}") from error
        self.settings: dict[str, Any] = json.loads(json.dumps({**settings, "version": _VERSION}))

    def load(self, device: torch.device) -> SumsSoFar | None:
        """What an interrupted run left, its sums on `device`; None if there is nothing.

        Raises:
            CalibrationError: the file is damaged, or was made with other settings.
        """
        if not self.path.exists():
            return None
        try:
            with safe_open(self.path, framework="pt", device=str(device)) as file:
                facts = json.loads((file.metadata() or {})["calibration"])
                self._check(facts["settings"])
                parts: dict[int, dict[str, torch.Tensor]] = {}
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    split, _, tensor = name.partition("/")
                    parts.setdefault(int(split), {})[tensor] = file.get_tensor(name)
            sums = {split: RidgeStatistics.from_tensors(tensors) for split, tensors in parts.items()}
            return SumsSoFar(int(facts["documents"]), str(facts["digest"]), sums)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise CalibrationError(
                f"the checkpoint {self.path} cannot be read ({error!r}); delete it to start anew"
            ) from error

    def save(self, state: SumsSoFar) -> None:
        """Replace the checkpoint; a crash on the way leaves the one before."""
        facts = {"settings": self.settings, "documents": state.documents, "digest": state.digest}
        tensors = {
            f"{split}/{name}": tensor
            for split, sums in state.by_split.items()
            for name, tensor in sums.to_tensors().items()
        }
        metadata = {"calibration": json.dumps(facts)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, lambda aside: save_file(tensors, aside, metadata))

    def remove(self) -> None:
        """Delete the checkpoint, and its directory if nothing else is in it."""
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()

    def refuse(self, why: str) -> CalibrationError:
        """The error to raise when the sums cannot be gone on with."""
        return CalibrationError(
            f"the checkpoint {self.path} is of another calibration: {why}; "
            "delete it to start anew, or point to another directory"
        )

    def _check(self, found: Mapping[str, Any]) -> None:
        names = sorted(self.settings.keys() | found.keys())
        changed = [name for name in names if self.settings.get(name) != found.get(name)]
        if changed:
            was = ", ".join(f"{name}={found.get(name)!r}" for name in changed)
            now = ", ".join(f"{name}={self.settings.get(name)!r}" for name in changed)
            raise self.refuse(f"it was made with {was}, now {now}")
