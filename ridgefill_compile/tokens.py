"""What each token is, as tensors by token id: its class, how often it occurs, and how words are read from it.

Selectors that choose rows by their token run inside a compiled graph, where there is no text. So the text of
every token is read once, from the tokenizer's vocabulary. How the vocabulary marks where a word starts (`Ġ` of
byte-level BPE, `▁` of SentencePiece, `##` of WordPiece on what is *not* a start) is seen from the vocabulary
itself; each becomes a plain space first, so that a class means the same with every tokenizer.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ridgefill_compile.errors import MapsError, OptionError


class TokenClass(IntEnum):
    """Classes of tokens. A start follows a space; a piece goes on with what is before it."""

    CAPITAL_START = 0
    CAPITAL_PIECE = 1
    LOWER_START = 2
    LOWER_PIECE = 3
    UNCASED_START = 4
    """Letters without case, of a script that puts spaces between words: Arabic, Hebrew, Hindi, Korean, ..."""
    UNCASED_PIECE = 5
    """Goes on with such a word; or letters of a script without spaces, where nothing shows what starts a word."""
    MIXED = 6
    """Letters beside digits or punctuation."""
    NUMBER = 7
    """Digits, alone or with punctuation, after a space or not."""
    PUNCTUATION = 8
    """Punctuation and symbols, emoji included."""
    SPACE = 9
    NEWLINE = 10
    SPECIAL = 11
    OTHER = 12
    """No text of its own: a part of a character, control characters, added markup such as `<think>`, no token."""


class SentenceEnd(IntEnum):
    """Whether a sentence ends behind a token."""

    NO = 0
    UNLESS_GLUED = 1
    """A full stop or the like: unless a word goes on right behind it, as in `3.14`."""
    ALWAYS = 2
    """A newline or a special token."""


class Vocabulary(Protocol):
    """What is asked of a tokenizer; those of transformers, fast and slow, give it."""

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of the special tokens that have a name."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """Id -> added token, which is spelt as it is meant and has the attribute `special`."""

    def get_vocab(self) -> dict[str, int]:
        """Token -> id, added tokens included."""


@dataclass(frozen=True, eq=False)
class TokenTable:
    """One entry per token id, from 0 to the largest. All tensors are `[size]`, on one device.

    The text of a word is hashed as `Σ code(byte_i) · B^i` in int64 arithmetic that wraps, over the UTF-8 bytes
    of its letters, marks and digits in Unicode's form NFKC, case folded. So with
    `h = piece_hash` and `p = piece_power`, pieces `a`, `b` make a word of hash `h[a] + p[a] · h[b]`, however
    the word was cut. `B` is odd, so powers have inverses.

    Attributes:
        token_class: int8, a `TokenClass`.
        count: int64, how often the token occurs in the calibration text; zeros if that is not known.
        content: bool, the token is part of a word or of a number.
        starts: bool, no word goes on from the row before into this token.
        ends: bool, no word goes on from this token into the next row.
        sentence_end: int8, a `SentenceEnd`.
        piece_hash: int64, hash of the token's part of a word; 0 where there is none.
        piece_power: int64, `B` to the number of bytes hashed.
        piece_inverse: int64, the inverse of `piece_power`.
    """

    token_class: Tensor
    count: Tensor
    content: Tensor
    starts: Tensor
    ends: Tensor
    sentence_end: Tensor
    piece_hash: Tensor
    piece_power: Tensor
    piece_inverse: Tensor

    @classmethod
    def of(cls, tokenizer: Vocabulary, counts: Tensor | None = None) -> TokenTable:
        """The table of a tokenizer, on the CPU.

        Args:
            tokenizer: any of transformers'.
            counts: see `with_counts`; zeros if None.

        Raises:
            OptionError: the object does not list its vocabulary as transformers' tokenizers do, the vocabulary
                is empty, or the counts do not fit it.
        """
        pieces = _pieces(tokenizer)
        hashes = [_hash(piece.word) for piece in pieces]
        table = cls(
            token_class=torch.tensor([piece.token_class for piece in pieces], dtype=torch.int8),
            count=torch.zeros(len(pieces), dtype=torch.int64),
            content=torch.tensor([bool(piece.word) for piece in pieces]),
            starts=torch.tensor([piece.starts for piece in pieces]),
            ends=torch.tensor([piece.ends for piece in pieces]),
            sentence_end=torch.tensor([piece.sentence_end for piece in pieces], dtype=torch.int8),
            piece_hash=torch.tensor([_signed(value) for value, _ in hashes]),
            piece_power=torch.tensor([_signed(power) for _, power in hashes]),
            piece_inverse=torch.tensor([_signed(pow(power, -1, _MODULUS)) for _, power in hashes]),
        )
        return table if counts is None else table.with_counts(counts)

    @property
    def size(self) -> int:
        """The number of ids, which is the largest plus one."""
        return self.token_class.shape[0]

    def with_counts(self, counts: Tensor) -> TokenTable:
        """The same table with other counts, `[size]` int64, such as those of `count_tokens`.

        Raises:
            OptionError: another shape or dtype, or a negative count.
        """
        if counts.shape != self.count.shape or counts.dtype != torch.int64:
            raise OptionError(f"counts must be [{self.size}] int64, not {list(counts.shape)} {counts.dtype}")
        if bool((counts < 0).any()):
            raise OptionError("counts must not be negative")
        return replace(self, count=counts.to(self.count.device))

    def to(self, device: torch.device | str) -> TokenTable:
        """The table on a device."""
        return TokenTable(**{name: tensor.to(device) for name, tensor in self.tensors().items()})

    def tensors(self) -> dict[str, Tensor]:
        """A flat dict for storage, of the table's own tensors; `from_tensors` is its inverse."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> TokenTable:
        """Rebuild the table from what `tensors` gave.

        Raises:
            MapsError: a tensor is missing, unknown, of another shape or dtype, or holds what cannot be.
        """
        if tensors.keys() != _DTYPES.keys():
            raise MapsError(f"a token table has {', '.join(_DTYPES)}, not {', '.join(tensors) or 'nothing'}")
        size = tensors["token_class"].numel()
        for name, dtype in _DTYPES.items():
            tensor = tensors[name]
            if tensor.shape != (size,) or tensor.dtype != dtype:
                found = f"{list(tensor.shape)} {tensor.dtype}"
                raise MapsError(f"the token table's {name} must be [{size}] {dtype}, not {found}")
        if size == 0:
            raise MapsError("the token table has no entries")
        for name, most in (("token_class", max(TokenClass)), ("sentence_end", max(SentenceEnd))):
            if not 0 <= int(tensors[name].min()) <= int(tensors[name].max()) <= most:
                raise MapsError(f"the token table's {name} must lie within 0 and {int(most)}")
        if int(tensors["count"].min()) < 0:
            raise MapsError("the token table's count must not be negative")
        return cls(**tensors)


def count_tokens(batches: Iterable[Tensor], size: int) -> Tensor:
    """How often each id occurs, `[size]` int64 on the CPU.

    Args:
        batches: token ids of any shape, without padding. Ids of no entry are left out.
        size: the table's.
    """
    counts = torch.zeros(size, dtype=torch.int64)
    for batch in batches:
        ids = batch.detach().to("cpu", torch.int64).flatten()
        counts += torch.bincount(ids[(ids >= 0) & (ids < size)], minlength=size)
    return counts


class _Piece(NamedTuple):
    """One token as it is read: `word` is what it adds to a word, in UTF-8."""

    token_class: TokenClass
    word: bytes = b""
    starts: bool = True
    ends: bool = True
    sentence_end: SentenceEnd = SentenceEnd.NO


_DTYPES = {
    "token_class": torch.int8,
    "count": torch.int64,
    "content": torch.bool,
    "starts": torch.bool,
    "ends": torch.bool,
    "sentence_end": torch.int8,
    "piece_hash": torch.int64,
    "piece_power": torch.int64,
    "piece_inverse": torch.int64,
}
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_STOPS = tuple(".!?…。！？．｡؟۔।॥")
_CLOSING = "\"'”’»)]}」』）】"
_JOINERS = "\u200c\u200d"
# How Unicode names the letters of scripts that put no space between words.
_UNSPACED = {"CJK", "IDEOGRAPHIC", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "BOPOMOFO"}
_UNSPACED |= {"THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN", "YI"}
_MODULUS = 2**64
_BASE = 0x9E3779B97F4A7C15
_CODES = [int.from_bytes(hashlib.blake2b(bytes([byte]), digest_size=8).digest(), "little") for byte in range(256)]


def _pieces(tokenizer: Vocabulary) -> list[_Piece]:
    try:
        tokens = {int(index): token for token, index in tokenizer.get_vocab().items()}
        added = {int(index): token for index, token in tokenizer.added_tokens_decoder.items()}
        special = {int(index) for index in tokenizer.all_special_ids}
    except (AttributeError, TypeError, ValueError) as error:
        raise OptionError(f"{type(tokenizer).__name__} cannot be used as a tokenizer: {error}") from error
    if not tokens:
        raise OptionError(f"{type(tokenizer).__name__} has no vocabulary")
    special |= {index for index, token in added.items() if token.special}
    read = _reader([token for index, token in tokens.items() if index not in special | added.keys()])
    pieces = [_Piece(TokenClass.OTHER)] * (max(tokens) + 1)
    for index, token in tokens.items():
        if index in special:
            pieces[index] = _Piece(TokenClass.SPECIAL, sentence_end=SentenceEnd.ALWAYS)
        elif index in added:
            pieces[index] = _added(token)
        else:
            pieces[index] = _piece(read(token))
    return pieces


def _reader(tokens: Collection[str]) -> Callable[[str], bytes]:
    """How this vocabulary spells text: token -> its bytes, with a space where a word starts."""
    marked: dict[Callable[[str], bytes], int] = {
        _from_byte_level: sum("Ġ" in token for token in tokens),
        _from_sentencepiece: sum("▁" in token for token in tokens),
        _from_wordpiece: sum(len(token) > 2 and token.startswith("##") for token in tokens),
    }
    # `##` is also a heading and `Ġ` a letter of Maltese, so the most frequent decides.
    best = max(marked, key=marked.__getitem__)
    if marked[best]:
        return best
    # No marks: either spaces stand in the tokens themselves, or every token is a word.
    spaced = any(token != token.strip() or " " in token for token in tokens)
    return _from_sentencepiece if spaced else _from_wordpiece


def _from_byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode(errors="replace")


def _from_sentencepiece(token: str) -> bytes:
    if found := _BYTE.fullmatch(token):
        return bytes.fromhex(found[1])
    return token.replace("▁", " ").encode(errors="replace")


def _from_wordpiece(token: str) -> bytes:
    goes_on = len(token) > 2 and token.startswith("##")
    return (token[2:] if goes_on else f" {token}").encode(errors="replace")


def _byte_of() -> dict[str, int]:
    """Byte-level BPE writes printable bytes as they are, and the others, in order, as the letters from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTE_OF = _byte_of()


def _added(token: str) -> _Piece:
    """An added token is spelt as it is meant, but for SentencePiece's spaces; it may be a word, or markup."""
    piece = _piece(token.replace("▁", " ").encode(errors="replace"))
    return _Piece(TokenClass.OTHER) if piece.token_class is TokenClass.MIXED else piece


def _piece(spelt: bytes) -> _Piece:
    text = spelt.decode(errors="replace")
    whole = "\ufffd" not in text
    if whole:
        letters = "".join(character for character in text if _kind(character) in "LN")
        word = unicodedata.normalize("NFKC", letters).casefold().encode()
    else:
        # Part of a character: its bytes make a word with the bytes around them.
        word = bytes(byte for byte in spelt.lower() if byte >= 0x80 or chr(byte).isalnum())
    if "\n" in text or "\r" in text:
        end = SentenceEnd.ALWAYS
    elif text.rstrip().rstrip(_CLOSING).endswith(_STOPS):
        end = SentenceEnd.UNLESS_GLUED
    else:
        end = SentenceEnd.NO
    if not word:
        return _Piece(_class(text) if whole else TokenClass.OTHER, sentence_end=end)
    return _Piece(
        _class(text) if whole else TokenClass.OTHER,
        word,
        starts=_kind(text[0]) not in "LN?" or _unspaced(text[0]),
        ends=_kind(text[-1]) not in "LN?" or _unspaced(text[-1]),
        sentence_end=end,
    )


def _class(text: str) -> TokenClass:
    letters = text.strip()
    kinds = {_kind(character) for character in letters}
    start = text[:1].isspace()
    if not kinds:
        return TokenClass.NEWLINE if "\n" in text or "\r" in text else TokenClass.SPACE
    if kinds == {"L"}:
        if letters[0].isupper() or letters[0].istitle():
            return TokenClass.CAPITAL_START if start else TokenClass.CAPITAL_PIECE
        if letters.lower() != letters.upper():
            return TokenClass.LOWER_START if start else TokenClass.LOWER_PIECE
        return TokenClass.UNCASED_START if start and not _unspaced(letters[0]) else TokenClass.UNCASED_PIECE
    if "L" in kinds:
        return TokenClass.MIXED
    if "N" in kinds and kinds <= {"N", "P"}:
        return TokenClass.NUMBER
    return TokenClass.PUNCTUATION if kinds == {"P"} else TokenClass.OTHER


def _kind(character: str) -> str:
    """`L` for letters and the marks on them, `N` for digits, `P` for punctuation and symbols.

    Whitespace is `Z`, the place of an unreadable byte `?`, and control characters and the like are `C`.
    """
    if character == "\ufffd":
        return "?"
    if character.isspace():
        return "Z"
    if character in _JOINERS:
        return "L"
    return {"M": "L", "S": "P"}.get(kind := unicodedata.category(character)[0], kind)


def _unspaced(character: str) -> bool:
    return unicodedata.name(character, "").split(" ")[0] in _UNSPACED


def _hash(word: bytes) -> tuple[int, int]:
    """`(Σ code(byte_i) · B^i, B^length)`, both modulo 2⁶⁴."""
    value, power = 0, 1
    for byte in word:
        value = (value + _CODES[byte] * power) % _MODULUS
        power = power * _BASE % _MODULUS
    return value, power


def _signed(value: int) -> int:
    """The int64 of the same bits."""
    return value - _MODULUS if value >= _MODULUS // 2 else value
