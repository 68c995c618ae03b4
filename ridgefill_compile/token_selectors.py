"""Rows chosen by their token: protected classes, numbers, specials, and sentences that share words with the question.

All are pure functions of token ids and a `TokenTable` on the same device, made to be traced into a graph: no
value is read on the host, no shape depends on a value, and every sample of a batch is answered by itself. An
id that the table has no entry for counts as a special token.

In every function `valid` `[batch, rows]` bool says which rows there are; rows of padding are chosen by nothing
and end every sentence. Without it all rows are, which is right too where padding is a special token, except
that `special_rows` then finds it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgefill_compile.tokens import SentenceEnd, TokenClass, TokenTable

KEPT_CLASSES = (
    TokenClass.CAPITAL_START,
    TokenClass.CAPITAL_PIECE,
    TokenClass.LOWER_PIECE,
    TokenClass.UNCASED_PIECE,
    TokenClass.MIXED,
)
"""What may be a name, an identifier, or part of a rare word.

A script without case cannot tell a name from a word, so it is treated as lower case: of Arabic, Hebrew, Hindi
or Korean, which put spaces between words, the pieces inside words are kept; of Chinese, Japanese or Thai,
which do not, every token of letters is.
"""

_NO_WORD = torch.iinfo(torch.int64).max


def protected_scores(ids: Tensor, table: TokenTable, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Which rows hold a token of a kept class, and how rare it is.

    The rows to keep exact are the first `protected_count(kept, share)` of a stable descending sort of the
    scores: the rarest, and of equally rare ones the lower row.

    Args:
        ids: `[batch, rows]` int64, of the rows to choose from.
        table: its counts say what is rare.
        valid: see the module.

    Returns:
        `kept` `[batch, rows]` bool, and `score` `[batch, rows]` float64: minus the add-one unigram frequency,
        `-(count + 1) / (total + size)`, and minus infinity where not kept.
    """
    classes = _classes(ids, table, valid)
    kept = torch.zeros_like(classes, dtype=torch.bool)
    for one in KEPT_CLASSES:
        kept = kept | (classes == int(one))
    # In float64 and without a logarithm: counts that differ stay apart and equal ones equal, in any compiled code.
    frequency = (_look(table.count, ids, 0) + 1).double() / (table.count.sum() + table.size).double()
    return kept, torch.where(kept, -frequency, -float("inf"))


def protected_count(kept: Tensor, share: float = 0.25) -> Tensor:
    """How many of the kept rows `[batch, rows]` to keep exact: `share` of them, halves to even; `[batch]` int64."""
    return (kept.sum(1).double() * share).round().long()


def number_rows(ids: Tensor, table: TokenTable, valid: Tensor | None = None) -> Tensor:
    """Rows `[batch, rows]` whose token is a number or a part of one; bool."""
    return _classes(ids, table, valid) == int(TokenClass.NUMBER)


def special_rows(ids: Tensor, table: TokenTable, valid: Tensor | None = None) -> Tensor:
    """Rows `[batch, rows]` whose token is special; bool."""
    special = _classes(ids, table, None) == int(TokenClass.SPECIAL)
    return special if valid is None else special & valid


def lexical_rows(
    ids: Tensor,
    table: TokenTable,
    prefix: int,
    valid: Tensor | None = None,
    *,
    question_tokens: int = 64,
    shared: int = 4,
    rare: int = 2,
    longest: int = 80,
) -> Tensor:
    """Rows of the prefix in sentences that speak of what the end of the prompt asks for.

    Such a sentence shares at least `shared` distinct words with the last `question_tokens` content tokens of
    the prompt, and holds a word that occurs at most `rare` times in the prefix. A word is a run of letters and
    digits, whatever its case and however it was cut into tokens, and each token of a script without spaces. Of
    a word that the question begins inside all is taken; a word counts where its first row is. A sentence ends
    behind a full stop or the like, a newline or a special token, and at the prefix's end.

    `O(rows log rows + rows · question_tokens)`.

    Args:
        ids: `[batch, rows]` int64, of the whole prompt.
        table: says what makes words and sentences.
        prefix: the first so many rows are the prefix.
        valid: see the module; of the whole prompt.
        question_tokens: how many content tokens, those with a letter or a digit, are the question.
        shared: distinct words to share, at least.
        rare: occurrences of a word that is rare, at most.
        longest: only the first so many rows of a sentence are chosen.

    Returns:
        `[batch, prefix]` bool. Special tokens are not chosen.
    """
    content, begins, words = _words(ids, table, valid)
    question = _question(content, words, question_tokens)

    begins, words = begins[:, :prefix], words[:, :prefix].contiguous()
    sentence, place = _sentences(ids, table, valid, prefix)

    # Of equal words of the question the search finds the first, so each distinct word has one number.
    number = torch.searchsorted(question, words).clamp(max=question_tokens - 1)
    asked = begins & (question.gather(1, number) == words)
    # One flag per sentence and word of the question; rows that were not asked for go to a sentence of their own.
    slot = torch.where(asked, sentence, prefix) * question_tokens + number
    flags = ids.new_zeros((ids.shape[0], (prefix + 1) * question_tokens), dtype=torch.bool)
    shares = flags.scatter(1, slot, True).view(-1, prefix + 1, question_tokens).sum(2)

    ordered = torch.where(begins, words, _NO_WORD).sort(1).values
    times = torch.searchsorted(ordered, words, right=True) - torch.searchsorted(ordered, words)
    rarities = torch.zeros_like(shares).scatter_add(1, sentence, (begins & (times <= rare)).long())

    chosen = ((shares >= shared) & (rarities > 0)).gather(1, sentence) & (place < longest)
    there = _classes(ids, table, valid)[:, :prefix] != int(TokenClass.SPECIAL)
    return chosen & there


def _words(ids: Tensor, table: TokenTable, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that are content, rows that begin a word, and the hash of the word that a content row is in."""
    content = _look(table.content, ids, False)
    ends = _look(table.ends, ids, True)
    if valid is not None:
        content, ends = content & valid, ends | ~valid
    begins = content & (_look(table.starts, ids, True) | _shifted(ends, 1, True))

    # The power of B that a row's bytes would have if all rows before were one word with it, and its inverse: a
    # word's hash is the sum over its rows, taken back to the word's first byte.
    pieces = torch.where(content, _look(table.piece_hash, ids, 0), 0)
    up = _shifted(torch.where(content, _look(table.piece_power, ids, 1), 1), 1, 1).cumprod(1)
    down = _shifted(torch.where(content, _look(table.piece_inverse, ids, 1), 1), 1, 1).cumprod(1)
    index = (begins.long().cumsum(1) - 1).clamp(min=0)  # rows before the first word hold no piece
    sums = torch.zeros_like(pieces).scatter_add(1, index, pieces * up)
    words = sums.gather(1, index) * down.gather(1, _latest(begins))
    return content, begins, words


def _question(content: Tensor, words: Tensor, tokens: int) -> Tensor:
    """The words of the last so many content rows, ascending, `[batch, tokens]`."""
    from_end = content.long().flip(1).cumsum(1).flip(1) - 1
    slot = torch.where(content & (from_end < tokens), from_end, tokens)
    empty = words.new_full((words.shape[0], tokens + 1), _NO_WORD)
    return empty.scatter(1, slot, words)[:, :tokens].sort(1).values


def _sentences(ids: Tensor, table: TokenTable, valid: Tensor | None, prefix: int) -> tuple[Tensor, Tensor]:
    """Of the prefix rows: the number of the sentence, from 0, and the place in it."""
    ends = _look(table.sentence_end, ids, int(SentenceEnd.ALWAYS))
    glued = _look(table.content, ids, False) & ~_look(table.starts, ids, True)
    if valid is not None:
        ends, glued = torch.where(valid, ends, int(SentenceEnd.ALWAYS)), glued & valid
    unless = (ends == int(SentenceEnd.UNLESS_GLUED)) & ~_shifted(glued, -1, False)
    last = (unless | (ends == int(SentenceEnd.ALWAYS)))[:, :prefix]
    first = _shifted(last, 1, True)
    rows = torch.arange(prefix, device=ids.device)
    return first.long().cumsum(1) - 1, rows - _latest(first)


def _latest(marked: Tensor) -> Tensor:
    """For each row the latest marked row up to it; 0 if there is none."""
    rows = torch.arange(marked.shape[1], device=marked.device)
    return torch.where(marked, rows, 0).cummax(1).values


def _shifted(values: Tensor, by: int, filler: int) -> Tensor:
    """Row `t` of the result is row `t - by`, and `filler` where there is none; `by` is 1 or -1."""
    edge = torch.full_like(values[:, :1], filler)
    return torch.cat([edge, values[:, :-1]] if by == 1 else [values[:, 1:], edge], dim=1)


def _classes(ids: Tensor, table: TokenTable, valid: Tensor | None) -> Tensor:
    classes = _look(table.token_class, ids, int(TokenClass.SPECIAL))
    return classes if valid is None else torch.where(valid, classes, int(TokenClass.SPECIAL))


def _look(values: Tensor, ids: Tensor, otherwise: int) -> Tensor:
    """The table's value for each id, and `otherwise` for ids of no entry."""
    size = values.shape[0]
    known = (ids >= 0) & (ids < size)
    return torch.where(known, values[ids.clamp(0, size - 1)], otherwise)
