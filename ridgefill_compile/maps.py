"""Fitted maps: what the compiler reads at a late layer, and what is known about them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ridgefill_compile import hub
from ridgefill_compile.errors import MapsError, RidgefillWarning
from ridgefill_compile.fingerprint import Match, ModelFingerprint, Tokenizer, tokenizer_fingerprint
from ridgefill_compile.int8 import Codes
from ridgefill_compile.mapfiles import read_directory, write_directory
from ridgefill_compile.splitmaps import HELD_OUT_DTYPE, SplitMaps, StoredMap, storage_dtype
from ridgefill_compile.tokens import TokenTable

__all__ = ["RidgeMaps", "SplitMaps"]

TOKENS = "tokens"  # the file of the tokenizer's table
STATE_PROMPTS = "state_prompts"  # in `calibration`: how many prompts the state differences are means over


class RidgeMaps:
    """The maps of one model, for one split or several; the properties speak of one of them, the default.

    Args:
        parts: the maps of each split.
        layer_count: how many layers the model has.
        model: fingerprint of the calibrated model; None (maps made by hand) matches every model.
        tokenizer: `tokenizer_fingerprint` of the tokenizer that made the ids, if one is known.
        split: the default split; the first of `parts` if not given.
        calibration: how the maps came about (window, stride, documents, ...), for the record.
        tokens: what each token of that tokenizer is, for selectors of rows that read tokens.

    Raises:
        MapsError: no parts, two of one split, different dtypes or cuts, or layers that the model does not have.
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
        tokens: TokenTable | None = None,
    ) -> None:
        self._parts = {part.split: part for part in parts}
        if not parts or len(self._parts) != len(parts):
            raise MapsError(f"maps need parts of different splits, not {[part.split for part in parts]}")
        if len({part.dtype for part in parts}) != 1:
            raise MapsError("maps of all splits must have one dtype")
        if len({part.cut for part in parts}) != 1:
            raise MapsError("maps of all splits must predict the same: inputs of layers, or projections")
        deepest = max(part.layers[-1] for part in parts)
        if deepest >= layer_count:
            raise MapsError(f"a map of layer {deepest} cannot be of a model of {layer_count} layers")
        self.layer_count = layer_count
        self.model = model
        self.tokenizer = tokenizer
        self.calibration = dict(calibration or {})
        self.tokens = tokens
        self.split = parts[0].split if split is None else split
        self._default = self._part(self.split)

    @classmethod
    def of_projections(
        cls,
        weights: Mapping[int, Sequence[Tensor]],
        *,
        split: int,
        layer_count: int,
        offsets: Mapping[int, Sequence[Tensor]] | None = None,
        norm: Tensor | None = None,
        epsilon: float = 1e-6,
        dtype: str = "bfloat16",
    ) -> RidgeMaps:
        """Maps that others made: trained or fitted weights that take the place of late layers' projections.

        What was trained along with them, queries, say, belongs into the model's own weights.

        Args:
            weights: late layer -> weights `[width, d_in]`, one for each projection that its states are made of, in the
                order in which the layer computes these: of keys and of values, or one of a fused projection.
            split: first late layer; it needs none.
            layer_count: how many layers the model has.
            offsets: late layer -> biases `[width]`, in the same order; zeros if not given.
            norm: weight `[d_in]` of an RMS norm that the split state goes through first; None: it goes through none.
            epsilon: that norm's.
            dtype: to store them in, as for `calibrate`.

        Raises:
            OptionError: no such dtype.
            MapsError: they do not fit together.
        """
        if offsets is None:
            offsets = {layer: [each.new_zeros(each.shape[0]) for each in found] for layer, found in weights.items()}
        widths = {layer: tuple(each.shape[0] for each in found) for layer, found in weights.items()}
        if widths != {layer: tuple(each.shape[0] for each in found) for layer, found in offsets.items()}:
            raise MapsError("projections need an offset as wide as each of them, or none at all")
        stored = {}
        try:
            for layer, found in weights.items():
                matrix = torch.cat([*found]).detach().float()
                matrix = matrix if norm is None else matrix * norm.float()
                stored[layer] = StoredMap.of(matrix, torch.cat([*offsets[layer]]).detach(), storage_dtype(dtype))
        except RuntimeError as error:
            raise MapsError(f"projections do not fit together: {error}") from error
        part = SplitMaps.made_of(split, stored, widths=widths, norm=None if norm is None else epsilon)
        return cls([part], layer_count=layer_count)

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
    def cut(self) -> str:
        """What is predicted of a layer: its "input", or the "projections" that its keys and values are made of."""
        return self._default.cut

    @property
    def norm(self) -> float | None:
        """Maps read `x / sqrt(mean(x²) + norm)` of a split state `x`; None: `x` itself."""
        return self._default.norm

    @property
    def first_rows(self) -> int:
        """Rows at the beginning of a text that the maps do not predict, and that a fill keeps exact."""
        return self._default.first_rows

    @property
    def d_in(self) -> int:
        """Width of the split state."""
        return self._default.d_in

    @property
    def dtype(self) -> torch.dtype:
        """Storage dtype of every matrix; `torch.int8` where `codes` are stored."""
        return self._default.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors as stored."""
        return self._default.nbytes

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
        """Late layer -> figures on held-out rows, scored on the tensors as calibration stored them; see `SplitMaps`."""
        return self._default.held_out

    def matrix(self, layer: int) -> Tensor:
        """`A_l`, `[d_out, d_in]`, as stored; of int8 maps in float32, which is exact, and made anew by each call.

        Raises:
            MapsError: the layer has no map at this split.
        """
        return self._default.matrix(self._known(layer))

    def codes(self, layer: int) -> Codes | None:
        """`A_l` as int8 maps store it: `int8.dequantise(*codes)` is `matrix(layer)`. None of maps in floats.

        Raises:
            MapsError: the layer has no map at this split.
        """
        return self._default.codes(self._known(layer))

    def shape(self, layer: int) -> tuple[int, int]:
        """`(d_out, d_in)` of `A_l`.

        Raises:
            MapsError: the layer has no map at this split.
        """
        d_out, d_in = self._default.matrices[self._known(layer)].shape
        return d_out, d_in

    def widths(self, layer: int) -> tuple[int, ...]:
        """Columns of what is predicted of a layer: its input's, or each projection's; `d_out` is their sum.

        Raises:
            MapsError: the layer has no map at this split.
        """
        known = self._known(layer)
        return self._default.widths.get(known, (self.shape(known)[0],))

    def offset(self, layer: int) -> Tensor:
        """`b_l`, `[d_out]`, as stored.

        Raises:
            MapsError: the layer has no map at this split.
        """
        return self._default.offsets[self._known(layer)]

    def state_difference(self, layer: int) -> Tensor | None:
        """Mean of the exact state minus the filled one of a recurrent layer, float32 `[heads, key, value]`; None where
        it was not calibrated (see `calibrate_states`).

        Raises:
            MapsError: the layer has no map at this split.
        """
        return self._default.states.get(self._known(layer))

    def with_state_differences(self, states: Mapping[int, Mapping[int, Tensor]], prompts: int) -> RidgeMaps:
        """The same maps with the state differences of some splits, in place of those they had.

        Args:
            states: split -> late layer -> float32 `[heads, key, value]`.
            prompts: how many they are means over, for the record.

        Raises:
            MapsError: there are no maps for such a split or layer, or a tensor is of another kind.
        """
        known = {split: replace(self._part(split), states=dict(found)) for split, found in states.items()}
        parts = [known.get(split, part) for split, part in self._parts.items()]
        return self._with(parts, calibration=self.calibration | {STATE_PROMPTS: prompts})

    def at(self, split: int) -> RidgeMaps:
        """The same maps with another default split; nothing is copied.

        Raises:
            MapsError: there are no maps for that split.
        """
        return self._with(list(self._parts.values()), split=split)

    def to(self, dtype: str) -> RidgeMaps:
        """The same maps in another storage dtype; themselves if it is theirs.

        `held_out` and `penalty_cosines` stay those of these maps: `calibration["held_out_dtype"]` of the result
        says so. Only float32 loses nothing.

        Args:
            dtype: "bfloat16", "float32", or "int8": codes of 8 bits with a scale for every 128 columns of a row,
                which put no weight off by more than 0.4 % of the largest of its group.

        Raises:
            OptionError: no such dtype.
            MapsError: int8 of maps that are not finite.
        """
        wanted = storage_dtype(dtype)
        if wanted == self.dtype:
            return self
        scored = {HELD_OUT_DTYPE: str(self.dtype).removeprefix("torch.")}
        parts = [part.to(wanted) for part in self._parts.values()]
        return self._with(parts, calibration=scored | self.calibration)

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
            "splits": [self._parts[split].to_record() for split in self.splits],
            "model": None,
            "tokenizer": self.tokenizer,
            "calibration": self.calibration,
        }
        if self.model is not None:
            facts["model"] = {"digests": sorted(self.model.digests), "shapes": dict(self.model.shapes)}
        files = {_name(split): part.to_tensors() for split, part in self._parts.items()}
        if self.tokens is not None:
            files[TOKENS] = self.tokens.tensors()
        write_directory(Path(directory), facts, files)

    @classmethod
    def load(
        cls, directory: str | Path, model: nn.Module | None = None, tokenizer: Tokenizer | None = None
    ) -> RidgeMaps:
        """Read maps from a directory, checking every byte.

        Tensors are on the CPU and mapped from the files, not copied: processes that load the same maps share the
        memory, and what nobody reads can leave it. Saving anew into the directory does not change them.

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
        maps = cls._read(Path(directory))
        maps._check_model(model, directory)
        maps._check_tokenizer(tokenizer, directory)
        return maps

    @classmethod
    def from_pretrained(
        cls,
        repo_or_directory: str | Path,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        model: nn.Module | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> RidgeMaps:
        """As `load`, of a directory, or of a repository of the Hugging Face Hub, which is fetched once.

        Args:
            repo_or_directory: a directory if there is one of that name, else a repository such as "user/maps".
            revision: branch, tag or commit of the repository.
            token: for a private one; default: that of `hf auth login`.
            cache_dir: where it is kept; default: the Hub's own cache.
            local_files_only: take it from there, and ask nobody.
            model: as for `load`.
            tokenizer: as for `load`.

        Raises:
            MapsError: as `load`; or the repository is not there or cannot be reached.

        Warns:
            RidgefillWarning: as `load`.
        """
        maps = hub.read(
            str(repo_or_directory),
            cls._read,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
        )
        maps._check_model(model, repo_or_directory)
        maps._check_tokenizer(tokenizer, repo_or_directory)
        return maps

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        commit_message: str = "Upload ridge maps",
        revision: str | None = None,
    ) -> str:
        """Upload the maps to a repository of their own on the Hugging Face Hub, made if need be.

        They take the place of maps that it holds, and a model card of them that of its README.md.

        Args:
            repo_id: such as "user/maps".
            private: whether a new repository is; default: the owner's.
            token: one that may write; default: that of `hf auth login`.
            commit_message: of the upload.
            revision: branch to upload to, made if need be; default: the main one.

        Returns:
            What `from_pretrained` takes.

        Raises:
            MapsError: the Hub cannot be reached, or refuses.
        """
        return hub.push(self, repo_id, private=private, token=token, commit_message=commit_message, revision=revision)

    @classmethod
    def _read(cls, root: Path) -> RidgeMaps:
        """The maps in a directory; raises as `load`."""
        facts, tensors = read_directory(root)
        try:
            known = facts["model"]
            return cls(
                [SplitMaps.from_record(record, tensors[_name(record["split"])]) for record in facts["splits"]],
                layer_count=facts["layer_count"],
                model=known and ModelFingerprint(frozenset(known["digests"]), known["shapes"]),
                tokenizer=facts["tokenizer"],
                tokens=TokenTable.from_tensors(tensors[TOKENS]) if TOKENS in tensors else None,
                split=facts["split"],
                calibration=facts["calibration"],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MapsError(f"the manifest in {root} is not complete: {error!r}") from error

    def _with(
        self, parts: Sequence[SplitMaps], *, split: int | None = None, calibration: Mapping[str, Any] | None = None
    ) -> RidgeMaps:
        return RidgeMaps(
            parts,
            layer_count=self.layer_count,
            model=self.model,
            tokenizer=self.tokenizer,
            tokens=self.tokens,
            split=self.split if split is None else split,
            calibration=self.calibration if calibration is None else calibration,
        )

    def _part(self, split: int) -> SplitMaps:
        if split not in self._parts:
            raise MapsError(f"no maps for split {split}; {_have('split', 'with maps', self.splits)}")
        return self._parts[split]

    def _known(self, layer: int) -> int:
        if layer not in self.layers:
            raise MapsError(
                f"no map for layer {layer} at split {self.split}; {_have('layer', 'with a map', self.layers)}"
            )
        return layer

    def _check_model(self, model: nn.Module | None, source: str | Path) -> None:
        if model is None or self.model is None:
            return
        match = self.model.match_whole(model, self.layer_count)
        if match == "other shapes":
            raise MapsError(
                f"the maps in {source} are of a model of {self.layer_count} layers and width {self.d_in}; "
                f"this {type(model).__name__} has other layers or widths"
            )
        if match == "other weights":
            warnings.warn(
                f"the maps in {source} were calibrated on other weights than this {type(model).__name__} has; "
                "they run, but calibrating anew may serve it better",
                RidgefillWarning,
                stacklevel=3,
            )

    def _check_tokenizer(self, tokenizer: Tokenizer | None, source: str | Path) -> None:
        if tokenizer is None or self.tokenizer is None or tokenizer_fingerprint(tokenizer) == self.tokenizer:
            return
        warnings.warn(f"the maps in {source} were calibrated with another tokenizer", RidgefillWarning, stacklevel=3)


def _name(split: int) -> str:
    return f"split-{split}"


def _have(what: str, with_what: str, numbers: Sequence[int]) -> str:
    """Such as "the only split with maps is 2"."""
    if len(numbers) == 1:
        return f"the only {what} {with_what} is {numbers[0]}"
    return f"the {what}s {with_what} are {', '.join(map(str, numbers))}"
