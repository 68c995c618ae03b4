"""Calibration: run documents through the exact model, keep sums, solve the maps, choose the penalty."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from ridgefill_compile.checkpoint import Checkpoint, SumsSoFar
from ridgefill_compile.documents import Document, hold_out, read_documents, shortest
from ridgefill_compile.errors import CalibrationError, OptionError
from ridgefill_compile.fingerprint import ModelFingerprint, Tokenizer, tokenizer_fingerprint
from ridgefill_compile.fit import fit_split
from ridgefill_compile.maps import RidgeMaps
from ridgefill_compile.meter import Meter
from ridgefill_compile.ridge import DEFAULT_PENALTIES, RidgeStatistics
from ridgefill_compile.splitmaps import CUTS, INPUT, SplitMaps, storage_dtype
from ridgefill_compile.tokens import TokenTable, count_tokens

# Enough for a mean cosine; more would cost passes, and memory for every layer's rows.
HELD_OUT_ROWS = 4096


class Collector(Protocol):
    """What calibration asks of the compiled graph; `collect.StateCollector` is the one.

    Attributes:
        widths: layer -> widths of its projections, where they are predicted.
    """

    widths: dict[int, tuple[int, ...]]

    @property
    def layers(self) -> int:
        """How many layers the model has; known after the first pass."""

    def sums(self, input_ids: Tensor) -> dict[int, RidgeStatistics]:
        """Split -> sums over every `stride`-th row of `input_ids` `[1, rows]`."""

    def rows(self, input_ids: Tensor) -> dict[int, Tensor]:
        """Layer -> its input on those rows, `[taken rows, d]`, for each split and all layers above; behind it the
        layer's projections, where they are predicted.
        """


@dataclass(frozen=True)
class _Settings:
    """The arguments of `calibrate` that are numbers and names, checked."""

    splits: tuple[int, ...]
    window: int
    stride: int
    penalties: tuple[float, ...]
    held_out: int
    dtype: str
    cut: str
    by_length: bool

    def __post_init__(self) -> None:
        if not self.splits or len(set(self.splits)) != len(self.splits):
            raise OptionError(f"splits must be one or more different layers, not {list(self.splits)}")
        _whole_numbers("splits", 0, *self.splits)
        _whole_numbers("window", 16, self.window)
        _whole_numbers("stride", 1, self.stride)
        _whole_numbers("held_out", 1, self.held_out)
        if self.stride > shortest(self.window):
            raise OptionError(f"stride {self.stride} must not exceed a quarter of the window, {self.window}")
        if not self.penalties or not all(0 <= penalty < math.inf for penalty in self.penalties):
            raise OptionError(f"penalties must be finite numbers of at least 0, not {list(self.penalties)}")
        storage_dtype(self.dtype)
        if self.cut not in CUTS:
            raise OptionError(f"cut must be one of {', '.join(map(repr, CUTS))}, not {self.cut!r}")

    def of_sums(self, held_out: int, model: ModelFingerprint, tokenizer: str | None) -> dict[str, Any]:
        """All that the sums depend on, besides the texts; penalties and dtype come after them."""
        return {
            "splits": sorted(self.splits),
            "window": self.window,
            "stride": self.stride,
            "cut": self.cut,
            "by_length": self.by_length,
            "held_out_documents": held_out,
            "model": model.key(),
            "tokenizer": tokenizer,
        }


def _whole_numbers(name: str, least: int, *values: object) -> None:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise OptionError(f"{name} must be whole numbers of at least {least}, not {value!r}")


def calibrate(
    model: nn.Module,
    texts_or_batches: Iterable[Any],
    *,
    splits: int | Sequence[int],
    tokenizer: Tokenizer | None = None,
    window: int = 2048,
    stride: int = 4,
    penalties: Sequence[float] = DEFAULT_PENALTIES,
    held_out: int = 5,
    checkpoint: str | Path | None = None,
    progress: bool = True,
    inner: str = "eager",
    dtype: str = "bfloat16",
    cut: str = INPUT,
    by_length: bool = False,
    _collector: Callable[..., Collector] | None = None,
) -> RidgeMaps:
    """Fit the maps of a model on text.

    The documents are read once, one at a time, so memory does not grow with their number. The first
    `held_out` ones are not fitted; they choose, for each split, the penalty with the highest mean cosine
    between predicted and true layer inputs. Of fewer than four times as many documents, a quarter is held
    out (at least one).

    Args:
        model: the model, with the weights and on the device it will be used with. It is run in evaluation
            mode, and left in the mode it was in.
        texts_or_batches: texts; or token ids `[rows]` or `[batch, rows]`; or mappings with `input_ids` and
            `attention_mask` (padded positions are dropped). Each text or sample is a document.
        splits: first late layers to fit maps for; all share the passes. The first one is the maps' default.
        tokenizer: turns texts into ids; of it a fingerprint goes into the maps, and what each of its tokens is, with
            its count in these texts.
        window: rows of one pass. A document's rest of under a quarter of a window is dropped.
        stride: every `stride`-th row of a window is fitted.
        penalties: the grid of `λ`; see `RidgeSolver`.
        held_out: documents that are held out.
        checkpoint: directory in which the sums are kept after each document. Interrupted, the same call
            with the same texts goes on there and ends with the same bits; afterwards the checkpoint is
            deleted.
        progress: show a progress bar on stderr.
        inner: compiler that lowers the graph, as in the backend's options.
        dtype: of the stored maps, "bfloat16", "float32" or "int8" (see `RidgeMaps.to`); held-out figures are of the
            tensors as stored.
        cut: what the maps predict of a late layer: its "input", or, to compare, the "projections" that its keys and
            values are made of (cheaper to fill with; the layer's norm no longer sets their scale).
        by_length: weigh rows by their square length, as the paper does; else each alike (see `ridge.py`).

    Raises:
        OptionError: a bad argument, or a split that the model does not have.
        CalibrationError: no text, or none as long as a quarter of a window; a weight, or a layer's input on
            some document, is NaN or infinite; the checkpoint is damaged or of another calibration.
        CalibrationError: the layers of the model cannot be located, its ids lie outside its vocabulary, or a late
            layer has no projections to predict.
    """
    if not isinstance(splits, int | Sequence):
        raise OptionError(f"splits must be a layer or a sequence of layers, not {splits!r}")
    layers = (splits,) if isinstance(splits, int) else tuple(splits)
    settings = _Settings(layers, window, stride, tuple(map(float, penalties)), held_out, dtype, cut, by_length)
    documents = read_documents(texts_or_batches, tokenizer)
    items = len(texts_or_batches) if isinstance(texts_or_batches, Sized) else None
    _check_weights(model)
    weights = ModelFingerprint.of(model)
    vocabulary = None if tokenizer is None else tokenizer_fingerprint(tokenizer)
    table = None if tokenizer is None else token_table(tokenizer)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with evaluating(model), torch.no_grad(), Meter(progress, items) as meter:
        held, rest = hold_out(documents, held_out, window)
        kept = earlier = None
        if checkpoint is not None:
            kept = Checkpoint(checkpoint, settings.of_sums(len(held), weights, vocabulary))
            earlier = kept.load(device)
        collector = _make_collector(model, settings, inner, _collector)
        run = _Run(settings, collector, device, meter, kept, None if table is None else torch.zeros_like(table.count))
        rows = run.held_out_rows(held)
        sums = run.sum_documents(held, rest, earlier)
        parts = [run.fit(sums.by_split[split], rows) for split in settings.splits]
    if kept is not None:
        kept.remove()
    facts = {
        "window": window,
        "stride": stride,
        "documents": sums.documents,
        "held_out_documents": len(held),
        "model": type(model).__name__,
    }
    tokens = None if table is None or run.counts is None else table.with_counts(run.counts)
    return RidgeMaps(
        parts, layer_count=collector.layers, model=weights, tokenizer=vocabulary, calibration=facts, tokens=tokens
    )


def token_table(tokenizer: Tokenizer) -> TokenTable | None:
    """What each token is; None of a tokenizer that only splits text and does not list its tokens."""
    try:
        return TokenTable.of(cast(Any, tokenizer))
    except (OptionError, AttributeError):
        return None


@dataclass
class _Run:
    """The passes over the model, and the fit of what they gave."""

    settings: _Settings
    collector: Collector
    device: torch.device
    meter: Meter
    checkpoint: Checkpoint | None
    counts: Tensor | None = None
    """Of every token id, how often the documents hold it."""
    starts: list[int] = field(default_factory=list)
    """Which of the held-out rows begin a window."""

    def sum_documents(
        self, held: Sequence[Document], documents: Iterable[Document], earlier: SumsSoFar | None
    ) -> SumsSoFar:
        """Sum all documents but those that an earlier run has summed; the held-out ones only count as read.

        Raises:
            CalibrationError: a layer's input is not finite, or the texts are not those of the checkpoint.
        """
        done = earlier.documents if earlier else 0
        state = SumsSoFar(0, "", earlier.by_split if earlier else {})
        for document in held:
            state.digest = _chained(state.digest, document)
        for document in documents:
            state.documents += 1
            state.digest = _chained(state.digest, document)
            if self.counts is not None:
                self.counts += count_tokens([document.ids], len(self.counts))
            if state.documents > done:
                self._add_document(state, document)
            elif earlier and state.documents == done and state.digest != earlier.digest:
                self._refuse_texts()
            self.meter.read(document)
        if state.documents < done:
            self._refuse_texts()
        return state

    def _add_document(self, state: SumsSoFar, document: Document) -> None:
        start = 0
        for ids in document.windows(self.settings.window):
            parts = self.collector.sums(self._batch(ids))
            spoilt = [part.first_nonfinite() for part in parts.values()]
            self._refuse_nonfinite(spoilt, document, start, len(ids))
            for split, part in parts.items():
                if split not in state.by_split:
                    state.by_split[split] = part.zeros_like()
                state.by_split[split].add(part)
            start += len(ids)
            self.meter.add_rows(len(ids))
        if self.checkpoint is not None:
            self.checkpoint.save(state)

    def held_out_rows(self, held: Sequence[Document]) -> dict[int, Tensor]:
        """Layer -> its input on rows of all held-out documents, `[rows, d]` float32 on the CPU.

        About `HELD_OUT_ROWS` rows, of windows spread over each document, whatever the documents' lengths.
        """
        settings = self.settings
        budget = max(1, HELD_OUT_ROWS // (len(held) * -(-settings.window // settings.stride)))
        rows: defaultdict[int, list[Tensor]] = defaultdict(list)
        for document in held:
            windows = document.windows(settings.window)
            for at in range(0, len(windows), -(-len(windows) // budget)):
                found = self.collector.rows(self._batch(windows[at]))
                self._check_splits()
                spoilt = [layer for layer, value in found.items() if not value.isfinite().all()]
                self._refuse_nonfinite(spoilt, document, at * settings.window, len(windows[at]))
                self.starts.append(sum(len(value) for value in rows[settings.splits[0]]))
                for layer, value in found.items():
                    rows[layer].append(value.to("cpu", torch.float32))
                self.meter.add_rows(len(windows[at]))
        return {layer: torch.cat(values) for layer, values in rows.items()}

    def fit(self, sums: RidgeStatistics, rows: dict[int, Tensor]) -> SplitMaps:
        """The maps of one split, at its best penalty."""
        watch = partial(self.meter.layers, sums.split)
        widths = None if self.settings.cut == INPUT else self.collector.widths
        return fit_split(sums, rows, self.settings.penalties, self.settings.dtype, watch, widths, self.starts)

    def _check_splits(self) -> None:
        deepest = self.collector.layers - 2
        for split in self.settings.splits:
            if split > deepest:
                raise OptionError(
                    f"split {split} leaves no layer to fit: the model has {self.collector.layers} layers, "
                    f"so a split can be 0 to {deepest}"
                )

    def _batch(self, ids: Tensor) -> Tensor:
        return ids[None].to(self.device)

    def _refuse_nonfinite(self, spoilt: Sequence[int | None], document: Document, start: int, rows: int) -> None:
        layers = [layer for layer in spoilt if layer is not None]
        if layers:
            raise CalibrationError(
                f"the input of layer {min(layers)} is NaN or infinite on document {document.index} "
                f"(counting from 0), in rows {start} to {start + rows - 1}; nothing of it was kept"
            )

    def _refuse_texts(self) -> None:
        assert self.checkpoint is not None
        raise self.checkpoint.refuse("the texts that it has summed are not the first of these")


def _make_collector(
    model: nn.Module, settings: _Settings, inner: str, factory: Callable[..., Collector] | None
) -> Collector:
    if factory is None:
        from ridgefill_compile.collect import StateCollector  # the compiler, wanted only when it runs

        factory = partial(StateCollector, cut=settings.cut, by_length=settings.by_length)
    return factory(model, settings.splits, stride=settings.stride, inner=inner)


def _check_weights(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        # Eight-bit floats cannot be asked themselves.
        values = parameter.detach() if parameter.element_size() > 1 else parameter.detach().float()
        if not values.isfinite().all():
            raise CalibrationError(f"parameter {name} holds NaN or infinite values")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside (dropout would be fitted too); each module's own mode again after."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _chained(digest: str, document: Document) -> str:
    return hashlib.sha256(digest.encode() + document.ids.numpy().tobytes()).hexdigest()
