"""Calibration and held-out windows of real text, with no document and no long passage on both sides.

Order and side depend on a document's name alone (hashed), so one machine always gives the same text, and a
package more or less moves no other document to the other side. A calibration document that shares 50 words in
a row with a held-out one is dropped, and so is a held-out document that repeats another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from typing import Any

import torch
from torch import Tensor

from ridgefill_compile.errors import CalibrationError
from ridgefill_compile.evaluate.sources import KINDS, Document, Kind, Source, machine_sources

SHARED_WORDS = 50
"""Words in a row that two documents may not share across the split."""
HELD_OUT_POOL = 40
"""Held-out documents of each kind, however few are asked for: calibration text must not depend on that."""
CHARACTERS_PER_TOKEN = 8
"""Characters tokenised at first for each token wanted; more only where that was not enough."""


@dataclass(frozen=True)
class Window:
    """The first tokens of one document. `ids` is `[1, rows]` int64."""

    name: str
    kind: Kind
    ids: Tensor


@dataclass(frozen=True)
class Texts:
    """Both sides of the split. Calibration documents are read as they are asked for."""

    held_out_documents: list[Document]
    sources: list[Source]

    def calibration(self, tokenizer: Any, rows: int, count: int) -> list[Window]:
        """`count` calibration windows of `rows` tokens each, one a document, prose and code in turn.

        Raises:
            CalibrationError: there are fewer documents of that length.
        """
        documents = in_turn([self.calibration_documents(kind) for kind in KINDS])
        return windows_of(documents, tokenizer, rows, count)

    def held_out(self, tokenizer: Any, rows: int, count: int) -> list[Window]:
        """`count` held-out windows of `rows` tokens each, one a document, prose and code in turn.

        Raises:
            CalibrationError: there are fewer documents of that length.
        """
        return windows_of(self.held_out_in_turn(), tokenizer, rows, count)

    def held_out_in_turn(self) -> Iterator[Document]:
        """Held-out documents, prose and code in turn."""
        by_kind = [[each for each in self.held_out_documents if each.kind == kind] for kind in KINDS]
        return in_turn([iter(documents) for documents in by_kind])

    def calibration_documents(self, kind: Kind) -> Iterator[Document]:
        """Calibration documents of a kind that share no 50 words in a row with any held-out document."""
        taken: set[int] = set()
        for held_out in self.held_out_documents:
            taken |= shingles(held_out.text)
        for source in self.sources:
            if source.kind == kind and not source.held_out:
                document = source.read()
                if document is not None and taken.isdisjoint(shingles(document.text)):
                    yield document


def split_texts(sources: Sequence[Source] | None = None, pool: int = HELD_OUT_POOL) -> Texts:
    """Split documents into calibration and held-out sides without overlap.

    Args:
        sources: where documents come from; by default all that `machine_sources()` finds.
        pool: how many held-out documents of each kind are kept.
    """
    ordered = sorted(machine_sources() if sources is None else sources, key=lambda source: source.place)
    kept: list[Document] = []
    taken: set[int] = set()
    for kind in KINDS:
        fresh = unseen((source for source in ordered if source.kind == kind and source.held_out), taken)
        kept += islice(fresh, pool)
    return Texts(kept, ordered)


def unseen(sources: Iterator[Source], taken: set[int]) -> Iterator[Document]:
    """Documents that share no 50 words in a row with those before; `taken` collects what they hold."""
    for source in sources:
        document = source.read()
        words = shingles(document.text) if document else set()
        if document is not None and taken.isdisjoint(words):
            taken |= words
            yield document


def shingles(text: str, words: int = SHARED_WORDS) -> set[int]:
    """Hashes of every run of `words` words; of the whole text where it is shorter."""
    split = text.split()
    return {hash(tuple(split[at : at + words])) for at in range(max(1, len(split) - words + 1))}


def in_turn(kinds: Sequence[Iterator[Document]]) -> Iterator[Document]:
    """Documents of several kinds in turn; what is left of a longer kind follows."""
    return (document for document in chain.from_iterable(zip_longest(*kinds)) if document is not None)


def windows_of(documents: Iterator[Document], tokenizer: Any, rows: int, count: int) -> list[Window]:
    """The first `rows` tokens of each of the first `count` documents that are long enough.

    Args:
        documents: in the order wanted; read only as far as needed.
        tokenizer: a transformers tokenizer; its own special tokens (such as BOS) are kept.
        rows: tokens a window.
        count: windows wanted.

    Raises:
        CalibrationError: fewer documents have that many tokens. Says how long the longest was.
    """
    found: list[Window] = []
    longest = 0
    for document in documents:
        if len(found) == count:
            break
        ids = tokens(tokenizer, document.text, rows)
        longest = max(longest, ids.shape[1])
        if ids.shape[1] == rows:
            found.append(Window(document.name, document.kind, ids))
    if len(found) < count:
        others = f"the longest document had {longest}" if longest else "there was no usable text"
        raise CalibrationError(f"need {count} documents of {rows} tokens, found {len(found)}: {others}")
    return found


def tokens(tokenizer: Any, text: str, rows: int) -> Tensor:
    """The first `rows` token ids of a text, `[1, rows]` int64; fewer where the text is shorter."""
    for part in (text[: rows * CHARACTERS_PER_TOKEN], text):
        ids = tokenizer(part, verbose=False)["input_ids"]
        if len(ids) > rows or part == text:
            break
    return torch.tensor([ids[:rows]], dtype=torch.long)


def long_prompt(documents: Iterator[Document], tokenizer: Any, rows: int) -> Tensor:
    """A prompt of `rows` tokens of real text, `[1, rows]` int64: documents one after another.

    Raises:
        CalibrationError: all of the text together is shorter.
    """
    parts: list[int] = []
    for document in documents:
        parts += tokenizer(document.text, verbose=False)["input_ids"]
        if len(parts) >= rows:
            return torch.tensor([parts[:rows]], dtype=torch.long)
    raise CalibrationError(f"need a prompt of {rows} tokens, all text together has {len(parts)}")
