"""The maps of one split: what is stored of them, in which dtype, and that it fits together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ridgefill_compile.errors import MapsError, OptionError
from ridgefill_compile.int8 import GROUP, Codes, dequantise, group_count, quantise

DTYPES: dict[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.int8}
INPUT, PROJECTIONS = CUTS = ("input", "projections")  # what the maps of a layer may predict; see `passes.cuts`
HELD_OUT_DTYPE = "held_out_dtype"  # in `RidgeMaps.calibration` of converted maps: the dtype that their figures are of


def storage_dtype(name: str) -> torch.dtype:
    """The dtype that maps are stored in under this name.

    Raises:
        OptionError: there is none.
    """
    if name not in DTYPES:
        raise OptionError(f"dtype must be one of {', '.join(map(repr, DTYPES))}, not {name!r}")
    return DTYPES[name]


class StoredMap(NamedTuple):
    """One map as it is stored.

    Attributes:
        matrix: `[d_out, d_in]`, bfloat16 or float32; or the int8 codes of it.
        offset: `[d_out]`, of the same dtype; bfloat16 beside codes.
        scales: bfloat16 `[d_out, groups]` of codes; None of floats.
    """

    matrix: Tensor
    offset: Tensor
    scales: Tensor | None

    @classmethod
    def of(cls, matrix: Tensor, offset: Tensor, dtype: torch.dtype) -> StoredMap:
        """A map of any float dtype, rounded to one of `DTYPES`.

        Raises:
            MapsError: int8 of a matrix that is not finite.
        """
        if dtype != torch.int8:
            return cls(matrix.to(dtype), offset.to(dtype), None)
        codes, scales = quantise(matrix)
        return cls(codes, offset.to(torch.bfloat16), scales)

    def cpu(self) -> StoredMap:
        """The same on the CPU."""
        return StoredMap(self.matrix.cpu(), self.offset.cpu(), None if self.scales is None else self.scales.cpu())

    def floats(self) -> Tensor:
        """The matrix, `[d_out, d_in]`: as stored, or what its codes stand for, in float32 (which is exact)."""
        return self.matrix if self.scales is None else dequantise(self.matrix, self.scales)


@dataclass(frozen=True, eq=False)
class SplitMaps:
    """The maps of one split: late layer `l` is predicted as `matrix(l) @ x + offsets[l]`.

    Attributes:
        split: first late layer; `x` is the residual stream that enters it. It needs no map itself.
        matrices: late layer -> `[d_out, d_in]`, all of one dtype, as stored: floats, or int8 codes.
        offsets: late layer -> `[d_out]`, of the same dtype; bfloat16 beside codes.
        penalty: the `λ` they were solved with, relative to the mean variance of `x`.
        rows: rows they were fitted on.
        held_out: late layer -> figures on rows that were not fitted: "cosine" between predicted and true
            layer input (mean over rows), "relative_error" (norm of the error over norm of the truth), and the
            same for predicting `x` itself where the widths allow it: "identity_cosine",
            "identity_relative_error". Of projections "cosine" and "relative_error" are means over them, and
            "cosine.0", "cosine.1", ... the figures of each.
        penalty_cosines: every `λ` tried -> mean held-out cosine over the layers.
        scales: late layer -> bfloat16 `[d_out, groups]`, of int8 codes; see `int8`. Empty of floats.
        widths: late layer -> the widths of its projections, in the order in which the layer computes them, where
            those are predicted: a matrix holds the rows of the first one, below them those of the second, ...
            Empty where it is the layer's input that is predicted.
        norm: maps read `x / sqrt(mean(x²) + norm)`; None: they read `x` itself.
        first_rows: rows at the beginning of a text that they do not predict, and that a fill keeps exact.
        states: late layer -> float32 `[heads, key, value]`: the mean over prompts of its recurrence's exact state minus
            the filled one. Empty where they were not calibrated.
    """

    split: int
    matrices: Mapping[int, Tensor]
    offsets: Mapping[int, Tensor]
    penalty: float = 0.0
    rows: float = 0.0
    held_out: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    penalty_cosines: Mapping[float, float] = field(default_factory=dict)
    scales: Mapping[int, Tensor] = field(default_factory=dict)
    widths: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    norm: float | None = None
    first_rows: int = 0
    states: Mapping[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.matrices or self.matrices.keys() != self.offsets.keys():
            raise MapsError(f"split {self.split} needs a matrix and an offset for each of its layers")
        if self.split < 0 or min(self.matrices) <= self.split:
            raise MapsError(f"split {self.split} can have maps of later layers only: {sorted(self.matrices)}")
        coded = self.matrices.keys() if self.dtype == torch.int8 else frozenset[int]()
        if self.scales.keys() != coded:
            raise MapsError(f"split {self.split} needs scales for each layer if its matrices are int8, and only then")
        if self.widths and self.widths.keys() != self.matrices.keys():
            raise MapsError(f"split {self.split} needs widths of projections for each of its layers, or for none")
        for layer in self.layers:
            if not self._fits(layer):
                raise MapsError(
                    f"the map of layer {layer} at split {self.split} does not fit the others: "
                    f"{', '.join(f'{name} {_kind(tensor)}' for name, tensor in self._named(layer).items())}, "
                    f"split state [{self.d_in}]"
                )
            if self.widths and sum(self.widths[layer]) != self.matrices[layer].shape[0]:
                raise MapsError(
                    f"the map of layer {layer} at split {self.split} predicts {self.matrices[layer].shape[0]} columns, "
                    f"and its projections have {' + '.join(map(str, self.widths[layer]))}"
                )
        self._check_states()

    def _check_states(self) -> None:
        for layer, state in self.states.items():
            if layer not in self.matrices or state.ndim != 3 or state.dtype != torch.float32:
                raise MapsError(
                    f"the state difference of layer {layer} at split {self.split} must be float32 "
                    f"[heads, key, value] of a late layer, not {_kind(state)}"
                )

    @classmethod
    def made_of(cls, split: int, maps: Mapping[int, StoredMap], **facts: Any) -> SplitMaps:
        """From late layer -> its map, and the other attributes by name.

        Raises:
            MapsError: the maps do not fit together.
        """
        return cls(
            split=split,
            matrices={layer: each.matrix for layer, each in maps.items()},
            offsets={layer: each.offset for layer, each in maps.items()},
            scales={layer: each.scales for layer, each in maps.items() if each.scales is not None},
            **facts,
        )

    @classmethod
    def from_record(cls, record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SplitMaps:
        """Rebuild the maps from what `to_record` and `to_tensors` gave.

        Raises:
            MapsError: the tensors are not those of the record, or are scaled in other groups than here.
            KeyError, TypeError, ValueError, AttributeError: the record is not complete.
        """
        dtype = DTYPES[record["dtype"]]
        if dtype == torch.int8 and record["group"] != GROUP:
            raise MapsError(
                f"the maps of split {record['split']} have a scale every {record['group']} columns; "
                f"this ridgefill-compile reads one every {GROUP}"
            )
        expected = {
            name: kind
            for layer, d_out in record["d_out"].items()
            for name, kind in _expected(layer, d_out, record["d_in"], dtype).items()
        }
        states = record.get("states", {})
        expected |= {f"{layer}.state": (tuple(size), torch.float32) for layer, size in states.items()}
        if {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()} != expected:
            raise MapsError(f"the file of split {record['split']} has other layers, widths or dtype than it should")
        maps = {
            int(layer): StoredMap(
                tensors[f"{layer}.matrix"], tensors[f"{layer}.offset"], tensors.get(f"{layer}.scales")
            )
            for layer in record["d_out"]
        }
        return cls.made_of(
            record["split"],
            maps,
            penalty=record["penalty"],
            rows=record["rows"],
            held_out={int(layer): figures for layer, figures in record["held_out"].items()},
            penalty_cosines=dict(record["penalty_cosines"]),
            widths={int(layer): tuple(widths) for layer, widths in record.get("widths", {}).items()},
            norm=record.get("norm"),
            first_rows=int(record.get("first_rows", 0)),
            states={int(layer): tensors[f"{layer}.state"] for layer in states},
        )

    @property
    def layers(self) -> tuple[int, ...]:
        """Late layers that have a map, ascending."""
        return tuple(sorted(self.matrices))

    @property
    def cut(self) -> str:
        """What is predicted, one of `CUTS`."""
        return PROJECTIONS if self.widths else INPUT

    @property
    def d_in(self) -> int:
        """Width of the split state."""
        return int(next(iter(self.matrices.values())).shape[-1])

    @property
    def dtype(self) -> torch.dtype:
        """Storage dtype of every matrix."""
        return next(iter(self.matrices.values())).dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(tensor.nbytes for tensor in self.to_tensors().values())

    def matrix(self, layer: int) -> Tensor:
        """`A_l`, `[d_out, d_in]`: as stored; of codes what they stand for, in float32, made anew by each call."""
        return self._stored(layer).floats()

    def codes(self, layer: int) -> Codes | None:
        """What is stored of `A_l` in int8; None if it is stored in floats."""
        return Codes(self.matrices[layer], self.scales[layer]) if self.scales else None

    def to(self, dtype: torch.dtype) -> SplitMaps:
        """The same maps in another storage dtype, with the figures of these; themselves if it is theirs.

        Raises:
            MapsError: int8 of maps that are not finite.
        """
        if dtype == self.dtype:
            return self
        return SplitMaps.made_of(
            self.split,
            {layer: StoredMap.of(self.matrix(layer), self.offsets[layer], dtype) for layer in self.layers},
            penalty=self.penalty,
            rows=self.rows,
            held_out=self.held_out,
            penalty_cosines=self.penalty_cosines,
            widths=self.widths,
            norm=self.norm,
            first_rows=self.first_rows,
            states=self.states,
        )

    def to_record(self) -> dict[str, Any]:
        """All but the tensors, in JSON values."""
        record: dict[str, Any] = {
            "split": self.split,
            "dtype": str(self.dtype).removeprefix("torch."),
            "d_in": self.d_in,
            "d_out": {str(layer): int(self.matrices[layer].shape[0]) for layer in self.layers},
            "penalty": self.penalty,
            "rows": self.rows,
            "held_out": {str(layer): dict(figures) for layer, figures in self.held_out.items()},
            "penalty_cosines": list(map(list, self.penalty_cosines.items())),
            "cut": self.cut,
            "norm": self.norm,
            "first_rows": self.first_rows,
        }
        if self.widths:
            record["widths"] = {str(layer): list(widths) for layer, widths in self.widths.items()}
        if self.states:
            record["states"] = {str(layer): list(state.shape) for layer, state in sorted(self.states.items())}
        return record | ({"group": GROUP} if self.scales else {})

    def to_tensors(self) -> dict[str, Tensor]:
        """The tensors as stored, such as `"17.matrix"`, `"17.offset"`, of codes `"17.scales"`, and `"17.state"`."""
        maps = {f"{layer}.{name}": tensor for layer in self.layers for name, tensor in self._named(layer).items()}
        return maps | {f"{layer}.state": state for layer, state in self.states.items()}

    def _stored(self, layer: int) -> StoredMap:
        return StoredMap(self.matrices[layer], self.offsets[layer], self.scales.get(layer))

    def _named(self, layer: int) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self._stored(layer)._asdict().items() if tensor is not None}

    def _fits(self, layer: int) -> bool:
        if self.dtype not in DTYPES.values() or self.matrices[layer].ndim != 2:
            return False
        found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self._named(layer).items()}
        expected = _expected(layer, self.matrices[layer].shape[0], self.d_in, self.dtype)
        return {f"{layer}.{name}": kind for name, kind in found.items()} == expected


def mean_figure(held_out: Mapping[Any, Mapping[str, float]], name: str) -> float | None:
    """Mean of a held-out figure over the layers that have it; None if none has."""
    values = [figures[name] for figures in held_out.values() if name in figures]
    return sum(values) / len(values) if values else None


def _expected(
    layer: int | str, d_out: int, d_in: int, dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name -> shape and dtype of each tensor of one map."""
    coded = dtype == torch.int8
    floats = torch.bfloat16 if coded else dtype
    kinds = {f"{layer}.matrix": ((d_out, d_in), dtype), f"{layer}.offset": ((d_out,), floats)}
    return kinds | ({f"{layer}.scales": ((d_out, group_count(d_in)), floats)} if coded else {})


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
