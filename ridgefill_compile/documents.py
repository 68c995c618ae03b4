"""Calibration text of any form as a stream of documents, each a row of token ids that is cut into windows."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgefill_compile.errors import CalibrationError, OptionError
from ridgefill_compile.fingerprint import Tokenizer


@dataclass(frozen=True, eq=False)
class Document:
    """One text.

    Attributes:
        index: its place among all documents, counting from 0.
        item: the place of the item it came in; a batch is one item and several documents.
        ids: its token ids, `[rows]` int64 on the CPU, without padding.
    """

    index: int
    item: int
    ids: Tensor

    def windows(self, window: int) -> list[Tensor]:
        """The ids in pieces of `window` rows, and a shorter last one if it is worth a pass.

        A rest under a quarter of a window is dropped: its rows see too little context to stand for a long
        prompt's.
        """
        starts = range(0, len(self.ids) - shortest(window) + 1, window)
        return [self.ids[start : start + window] for start in starts]


def shortest(window: int) -> int:
    """The fewest rows that are worth a pass."""
    return window // 4


def read_documents(items: Iterable[Any], tokenizer: Tokenizer | None) -> Iterator[Document]:
    """Documents of the items, one at a time, in order; nothing is kept.

    Args:
        items: texts; or token ids, `[rows]` or `[batch, rows]`; or mappings with `input_ids` and, where a
            batch is padded, `attention_mask` of the same shape. Each sample of a batch is a document.
        tokenizer: turns texts into ids.

    Raises:
        OptionError: `items` is one text or one tensor rather than several, or an item is of none of these
            forms, or a text without a tokenizer.
    """
    if isinstance(items, str | bytes | Tensor | Mapping) or not isinstance(items, Iterable):
        raise OptionError(f"expected an iterable of texts or batches, got a {type(items).__name__}: put it in a list")
    return _read(items, tokenizer)


def hold_out(documents: Iterator[Document], wanted: int, window: int) -> tuple[list[Document], Iterator[Document]]:
    """The documents to hold out, and the others; those that are too short for a window are left out of both.

    The first `wanted` documents are held out, or of fewer than four times as many a quarter, at least one.
    To learn how many there are, so many are read ahead; the others stay unread until asked for.

    Raises:
        CalibrationError: no text, too short a text, or a single one.
    """
    longest = -1

    def usable() -> Iterator[Document]:
        nonlocal longest
        for document in documents:
            longest = max(longest, len(document.ids))
            if document.windows(window):
                yield document

    rest = usable()
    ahead = deque(itertools.islice(rest, 4 * wanted))
    if longest < 0:
        raise CalibrationError("no text to calibrate on: there was not one document")
    if not ahead:
        raise CalibrationError(
            f"text shorter than a window: the longest document has {longest} rows, and a window of {window} "
            f"wants at least {shortest(window)}; pass longer documents or a smaller window"
        )
    if len(ahead) == 1:
        raise CalibrationError(
            "only one document is long enough: it is held out to choose the penalty, so none is left to fit; "
            "pass at least two, such as the parts of a long text"
        )
    held = [ahead.popleft() for _ in range(max(1, len(ahead) // 4))]
    return held, itertools.chain(_drained(ahead), rest)


def _drained(documents: deque[Document]) -> Iterator[Document]:
    while documents:
        yield documents.popleft()


def _read(items: Iterable[Any], tokenizer: Tokenizer | None) -> Iterator[Document]:
    index = 0
    for place, item in enumerate(items):
        for ids in _tokenized(place, item, tokenizer) if isinstance(item, str) else _samples(place, item):
            yield Document(index, place, ids)
            index += 1


def _tokenized(place: int, text: str, tokenizer: Tokenizer | None) -> Iterator[Tensor]:
    if tokenizer is None:
        raise OptionError("texts need a tokenizer: pass tokenizer=..., or batches of token ids")
    try:
        # Not verbose: that a text is longer than the model's context is what windows are for.
        ids = tokenizer(text, verbose=False)["input_ids"]
    except (TypeError, ValueError) as error:
        raise OptionError(f"the tokenizer refused text {place}: {error}") from error
    yield torch.tensor(ids, dtype=torch.int64)


def _samples(place: int, item: Any) -> Iterator[Tensor]:
    mask = None
    if isinstance(item, Mapping):
        if "input_ids" not in item:
            raise OptionError(f"item {place} has no 'input_ids', only {', '.join(map(repr, item)) or 'nothing'}")
        item, mask = item["input_ids"], item.get("attention_mask")
    ids = _two_axes(place, "token ids", item)
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise OptionError(f"item {place}: token ids must be whole numbers, not {ids.dtype}")
    if mask is None:
        yield from ids.to("cpu", torch.int64)
        return
    kept = _two_axes(place, "attention_mask", mask).bool()
    if kept.shape != ids.shape:
        raise OptionError(f"item {place}: attention_mask {list(kept.shape)} does not match input_ids {list(ids.shape)}")
    for row, keep in zip(ids.to("cpu", torch.int64), kept.cpu(), strict=True):
        yield row[keep]


def _two_axes(place: int, what: str, value: Any) -> Tensor:
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise OptionError(f"item {place} is neither a text nor a batch of {what}: {error}") from error
    if tensor.ndim not in (1, 2):
        raise OptionError(f"item {place}: {what} must be [rows] or [batch, rows], not {list(tensor.shape)}")
    return tensor[None] if tensor.ndim == 1 else tensor
