"""Fitted maps: what the compiler reads at a late layer, and what is known about them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ridgefill_compile.errors import MapsError, RidgefillWarning
from ridgefill_compile.fingerprint import Match, ModelFingerprint, Tokenizer, tokenizer_fingerprint
from ridgefill_compile.mapfiles import read_directory, write_directory

DTYPES: dict[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, eq=False)
class SplitMaps:
    """The maps of one split: late layer `l` is predicted as `matrices[l] @ x + offsets[l]`.

    Attributes:
        split: first late layer; `x` is the residual stream that enters it. It needs no map itself.
        matrices: late layer -> `[d_out, d_in]`, all of one dtype, as stored.
        offsets: late layer -> `[d_out]`, of the same dtype.
        penalty: the `λ` they were solved with, relative to the mean variance of `x`.
        rows: rows they were fitted on.
        held_out: late layer -> figures on rows that were not fitted: "cosine" between predicted and true
            layer input (mean over rows), "relative_error" (norm of the error over norm of the truth), and the
            same for predicting `x` itself where the widths allow it: "identity_cosine",
            "identity_relative_error".
        penalty_cosines: every `λ` tried -> mean held-out cosine over the layers.
    """

    split: int
    matrices: Mapping[int, Tensor]
    offsets: Mapping[int, Tensor]
    penalty: float = 0.0
    rows: float = 0.0
    held_out: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    penalty_cosines: Mapping[float, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.matrices or self.matrices.keys() != self.offsets.keys():
            raise MapsError(f"split {self.split} needs a matrix and an offset for each of its layers")
        if self.split < 0 or min(self.matrices) <= self.split:
            raise MapsError(f"split {self.split} can have maps of later layers only: {sorted(self.matrices)}")
        for layer, matrix in self.matrices.items():
            offset = self.offsets[layer]
            fits = matrix.ndim == 2 and matrix.shape[1] == self.d_in and offset.shape == matrix.shape[:1]
            if not fits or {matrix.dtype, offset.dtype} != {self.dtype} or self.dtype not in DTYPES.values():
                raise MapsError(
                    f"the map of layer {layer} at split {self.split} does not fit the others: "
                    f"matrix {_kind(matrix)}, offset {_kind(offset)}, split state [{self.d_in}]"
                )

    @property
    def layers(self) -> tuple[int, ...]:
        """Late layers that have a map, ascending."""
        return tuple(sorted(self.matrices))

    @property
    def d_in(self) -> int:
        """Width of the split state."""
        return int(next(iter(self.matrices.values())).shape[-1])

    @property
    def dtype(self) -> torch.dtype:
        """Storage dtype of every tensor."""
        return next(iter(self.matrices.values())).dtype


class RidgeMaps:
    """The maps of one model, for one split or several; the properties speak of one of them, the default.

    Args:
        parts: the maps of each split.
        layer_count: how many layers the model has.
        model: fingerprint of the calibrated model; None (maps made by hand) matches every model.
        tokenizer: `tokenizer_fingerprint` of the tokenizer that made the ids, if one is known.
        split: the default split; the first of `parts` if not given.
        calibration: how the maps came about (window, stride, documents, ...), for the record.

    Raises:
        MapsError: no parts, two of one split, different dtypes, or layers that the model does not have.
    """

    def __init__(
        self,
        parts: Sequence[SplitMaps],
        *,
        layer_count: int,
        model: ModelFingerprint | None = None,
        tokenizer: str | None = None,
        split: int | None = None,
        calibration: Mapping[str, Any] | None = None,
    ) -> None:
        self._parts = {part.split: part for part in parts}
        if not parts or len(self._parts) != len(parts):
            raise MapsError(f"maps need parts of different splits, not {[part.split for part in parts]}")
        if len({part.dtype for part in parts}) != 1:
            raise MapsError("maps of all splits must have one dtype")
        deepest = max(part.layers[-1] for part in parts)
        if deepest >= layer_count:
            raise MapsError(f"a map of layer {deepest} cannot be of a model of {layer_count} layers")
        self.layer_count = layer_count
        self.model = model
        self.tokenizer = tokenizer
        self.calibration = dict(calibration or {})
        self.split = parts[0].split if split is None else split
        self._default = self._part(self.split)

    def __repr__(self) -> str:
        return f"RidgeMaps(split={self.split}, splits={self.splits}, layers={self.layers}, d_in={self.d_in})"

    @property
    def splits(self) -> tuple[int, ...]:
        """Every split there are maps for, ascending."""
        return tuple(sorted(self._parts))

    @property
    def layers(self) -> tuple[int, ...]:
        """Late layers that have a map, ascending: `split + 1` to the last one."""
        return self._default.layers

    @property
    def d_in(self) -> int:
        """Width of the split state."""
        return self._default.d_in

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of every matrix and offset."""
        return self._default.dtype

    @property
    def penalty(self) -> float:
        """The `λ` that was chosen, relative to the mean variance of the split state."""
        return self._default.penalty

    @property
    def penalty_cosines(self) -> Mapping[float, float]:
        """Every `λ` tried -> mean held-out cosine over the layers."""
        return self._default.penalty_cosines

    @property
    def rows(self) -> float:
        """Rows that were fitted."""
        return self._default.rows

    @property
    def held_out(self) -> Mapping[int, Mapping[str, float]]:
        """Late layer -> figures on held-out rows, scored on the tensors as stored; see `SplitMaps`."""
        return self._default.held_out

    def matrix(self, layer: int) -> Tensor:
        """`A_l`, `[d_out, d_in]`.

        Raises:
            MapsError: the layer has no map at this split.
        """
        return self._of(self._default.matrices, layer)

    def offset(self, layer: int) -> Tensor:
        """`b_l`, `[d_out]`.

        Raises:
            MapsError: the layer has no map at this split.
        """
        return self._of(self._default.offsets, layer)

    def at(self, split: int) -> RidgeMaps:
        """The same maps with another default split; nothing is copied.

        Raises:
            MapsError: there are no maps for that split.
        """
        return RidgeMaps(
            list(self._parts.values()),
            layer_count=self.layer_count,
            model=self.model,
            tokenizer=self.tokenizer,
            split=split,
            calibration=self.calibration,
        )

    def matches(self, parameters: Iterable[Tensor]) -> Match:
        """Whether these parameters, all or some of a model's, are those of the calibrated model.

        See `ModelFingerprint.match` for what "same", "other weights" and "other shapes" mean.
        """
        return "same" if self.model is None else self.model.match(parameters, self.layer_count)

    def save(self, directory: str | Path) -> None:
        """Write the maps into a directory, made if need be: a safetensors file a split, and `manifest.json`.

        A directory that holds maps already has the old ones or the new ones at every moment, whatever
        happens. Two processes must not save into one directory at a time.

        Raises:
            OSError: the disk's own errors; the old maps are then still there.
        """
        facts = {
            "layer_count": self.layer_count,
            "split": self.split,
            "splits": [_record(self._parts[split]) for split in self.splits],
            "model": None,
            "tokenizer": self.tokenizer,
            "calibration": self.calibration,
        }
        if self.model is not None:
            facts["model"] = {"digests": sorted(self.model.digests), "shapes": dict(self.model.shapes)}
        write_directory(Path(directory), facts, {_name(split): _tensors(part) for split, part in self._parts.items()})

    @classmethod
    def load(
        cls, directory: str | Path, model: nn.Module | None = None, tokenizer: Tokenizer | None = None
    ) -> RidgeMaps:
        """Read maps from a directory, checking every byte. Tensors are on the CPU.

        Args:
            directory: what `save` was given.
            model: the model they are to be used with.
            tokenizer: the tokenizer they are to be used with.

        Raises:
            MapsError: no maps there; a file is missing, truncated, altered or not a safetensors file (a
                pickle is never opened); the manifest is foreign or of another version; the model has other
                widths or layers.

        Warns:
            RidgefillWarning: the model's weights or the tokenizer are not those of the calibration.
        """
        root = Path(directory)
        facts, tensors = read_directory(root)
        try:
            known = facts["model"]
            maps = cls(
                [_part(record, tensors[_name(record["split"])]) for record in facts["splits"]],
                layer_count=facts["layer_count"],
                model=known and ModelFingerprint(frozenset(known["digests"]), known["shapes"]),
                tokenizer=facts["tokenizer"],
                split=facts["split"],
                calibration=facts["calibration"],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MapsError(f"the manifest in {root} is not complete: {error!r}") from error
        maps._check_model(model, root)
        maps._check_tokenizer(tokenizer, root)
        return maps

    def _part(self, split: int) -> SplitMaps:
        if split not in self._parts:
            have = ", ".join(map(str, self.splits))
            raise MapsError(f"no maps for split {split}; the splits with maps are {have}")
        return self._parts[split]

    def _of(self, tensors: Mapping[int, Tensor], layer: int) -> Tensor:
        if layer not in tensors:
            have = ", ".join(map(str, self.layers))
            raise MapsError(f"no map for layer {layer} at split {self.split}; the layers with a map are {have}")
        return tensors[layer]

    def _check_model(self, model: nn.Module | None, root: Path) -> None:
        if model is None or self.model is None:
            return
        match = self.model.match_whole(model, self.layer_count)
        if match == "other shapes":
            raise MapsError(
                f"the maps in {root} are of a model of {self.layer_count} layers and width {self.d_in}; "
                f"this {type(model).__name__} has other layers or widths"
            )
        if match == "other weights":
            warnings.warn(
                f"the maps in {root} were calibrated on other weights than this {type(model).__name__} has; "
                "they run, but calibrating anew may serve it better",
                RidgefillWarning,
                stacklevel=3,
            )

    def _check_tokenizer(self, tokenizer: Tokenizer | None, root: Path) -> None:
        if tokenizer is None or self.tokenizer is None or tokenizer_fingerprint(tokenizer) == self.tokenizer:
            return
        warnings.warn(f"the maps in {root} were calibrated with another tokenizer", RidgefillWarning, stacklevel=3)


def _record(part: SplitMaps) -> dict[str, Any]:
    """What the manifest says of one split."""
    return {
        "split": part.split,
        "dtype": str(part.dtype).removeprefix("torch."),
        "d_in": part.d_in,
        "d_out": {str(layer): int(part.matrices[layer].shape[0]) for layer in part.layers},
        "penalty": part.penalty,
        "rows": part.rows,
        "held_out": {str(layer): dict(figures) for layer, figures in part.held_out.items()},
        "penalty_cosines": list(map(list, part.penalty_cosines.items())),
    }


def _part(record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SplitMaps:
    """The inverse of `_record` and `_tensors`."""
    d_in, dtype = record["d_in"], DTYPES[record["dtype"]]
    expected: dict[str, tuple[int, ...]] = {}
    for layer, d_out in record["d_out"].items():
        expected |= {f"{layer}.matrix": (d_out, d_in), f"{layer}.offset": (d_out,)}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != expected or any(tensor.dtype != dtype for tensor in tensors.values()):
        raise MapsError(f"the file of split {record['split']} has other layers, widths or dtype than it should")
    return SplitMaps(
        split=record["split"],
        matrices={int(layer): tensors[f"{layer}.matrix"] for layer in record["d_out"]},
        offsets={int(layer): tensors[f"{layer}.offset"] for layer in record["d_out"]},
        penalty=record["penalty"],
        rows=record["rows"],
        held_out={int(layer): figures for layer, figures in record["held_out"].items()},
        penalty_cosines=dict(record["penalty_cosines"]),
    )


def _tensors(part: SplitMaps) -> dict[str, Tensor]:
    tensors = {f"{layer}.matrix": matrix for layer, matrix in part.matrices.items()}
    return tensors | {f"{layer}.offset": offset for layer, offset in part.offsets.items()}


def _name(split: int) -> str:
    return f"split-{split}"


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
