"""Rows that selectors keep exact of a prompt in pieces: chosen by ids, positions and padding, before its end has run.

They are those of a prompt at once. But the graph of a chunk has one list of exact rows for all sequences of a batch: a
row that one of them keeps is exact in all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ridgefill_compile.errors import CannotFill
from ridgefill_compile.prompt import NO_TOKENS, Prompt
from ridgefill_compile.selectors import Selector, choose
from ridgefill_compile.tokens import TokenTable


def rows_to_keep(
    selectors: Sequence[Selector],
    rows: int,
    tail: int,
    *,
    first_rows: int = 0,
    former: int = 0,
    padding: Tensor | None = None,
    ids: Tensor | None = None,
    tokens: TokenTable | None = None,
) -> set[int]:
    """Positions of the prefix rows that stay exact.

    Args:
        selectors: of option `rows`.
        rows: of the prompt.
        tail: its last rows, which are exact anyway.
        first_rows: first rows of each sequence that are kept, too.
        former: rows of former turns, which the cache holds.
        padding: how many rows of padding each sequence begins with, int64 [batch].
        ids: of the whole prompt, int64 [batch, rows]; None: they are not known.
        tokens: the tokenizer's table, if it was saved with the maps.

    Raises:
        CannotFill: a selector reads what a chunk does not hold.
    """
    for selector in selectors:
        if not getattr(selector, "from_tokens", False):
            raise CannotFill(
                f"the rows of a prompt in pieces cannot be selected by {type(selector).__name__}: it may read "
                "attention (it does not say from_tokens = True), and the prompt's last rows are not there yet",
                hint="run the prompt at once; or select by tokens and positions alone (protected, numbers, random, "
                "tail, or a selector with from_tokens = True)",
            )
    batch = max(1 if each is None else len(each) for each in (ids, padding))
    valid = None
    if padding is not None and bool(padding.any()):
        valid = (torch.arange(rows) >= padding.unsqueeze(1)).expand(batch, -1)
    prompt = Prompt(
        batch=batch,
        rows=rows,
        prefix=rows - tail,
        first=former,
        device=torch.device("cpu"),
        ids=None if ids is None else ids.repeat_interleave(batch // len(ids), 0),  # as often as there are beams
        valid=valid,
        tokens=tokens,
    )
    try:
        return set(choose(prompt, selectors, first_rows).unique().tolist())
    except CannotFill as refusal:
        if refusal.reason != NO_TOKENS:
            raise
        raise CannotFill(
            "the rows of a prompt in pieces are to be selected by its tokens, and they are not known",
            hint="prompt_length(ids): say the prompt's ids [batch, rows] in place of their number",
        ) from refusal
