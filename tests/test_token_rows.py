"""Rows selected by their token, and by a probe, in compiled fills: which are exact is read off late keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ridgefill_compile import CannotFill, RidgeMaps
from ridgefill_compile.selectors import Numbers, Probe, Protected, Selector
from ridgefill_compile.tokens import TokenClass, TokenTable
from tests.toys import compiled, plain, prompt, random_maps

ROWS, TAIL = 80, 16
PREFIX = ROWS - TAIL
MODEL = plain(layers=4)
WIDTH, SIZE = MODEL.config.width, MODEL.config.vocabulary
NUMBERS, CAPITALS, SPECIALS = {1, 2}, set(range(3, 12)), {0}


def table() -> TokenTable:
    """Ids that are numbers, capitalised words (the rarer, the higher the id), a special token, and lower-case words."""

    def kind(token: int) -> TokenClass:
        if token in NUMBERS:
            return TokenClass.NUMBER
        if token in CAPITALS:
            return TokenClass.CAPITAL_START
        return TokenClass.SPECIAL if token in SPECIALS else TokenClass.LOWER_START

    classes = [kind(token) for token in range(SIZE)]
    words = torch.tensor([each != TokenClass.SPECIAL for each in classes])
    return TokenTable(
        token_class=torch.tensor([int(each) for each in classes], dtype=torch.int8),
        count=torch.tensor([100 - token for token in range(SIZE)]),
        content=words,
        starts=torch.ones(SIZE, dtype=torch.bool),
        ends=torch.ones(SIZE, dtype=torch.bool),
        sentence_end=torch.zeros(SIZE, dtype=torch.int8),
        piece_hash=torch.arange(1, SIZE + 1),
        piece_power=torch.ones(SIZE, dtype=torch.int64),
        piece_inverse=torch.ones(SIZE, dtype=torch.int64),
    )


def maps(tokens: TokenTable | None) -> RidgeMaps:
    """Maps of the model that predict nonsense, with a table of its tokens."""
    plain_maps = random_maps(WIDTH, 4)
    return RidgeMaps([plain_maps._part(1)], layer_count=4, tokens=tokens)


def exact_rows(ids: Tensor, selector: Selector, tokens: TokenTable | None) -> list[set[int]]:
    """Of each sequence, the prefix rows whose keys in the first predicted layer are the exact model's."""
    torch._dynamo.reset()
    options: dict[str, Any] = {"maps": maps(tokens), "tail": TAIL, "min_fill": 8, "inner": "eager", "rows": selector}
    fast = compiled(MODEL, {**options, "strict": True, "verify": True})
    with torch.no_grad():
        exact, filled = MODEL(ids, logits_to_keep=1), fast(ids, logits_to_keep=1)
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(exact) if isinstance(leaf, Tensor)]
    found = [leaf for leaf in torch.utils._pytree.tree_leaves(filled) if isinstance(leaf, Tensor)]
    # Layer 2 is the first whose input is predicted; of a selected row it is made from exact keys alone.
    keys = [(a, b) for a, b in zip(tensors, found, strict=True) if a.dim() == 4][2]
    same = ((keys[0] - keys[1]).abs().amax((1, 3)) < 1e-4)[:, :PREFIX]
    return [set(row.nonzero()[:, 0].tolist()) for row in same]


def test_numbers_first_then_the_last_rows() -> None:
    """All rows of numbers, and the rest of the share at the end of the prefix, for each sequence."""
    ids = prompt(ROWS, batch=2)
    share = 0.5
    for sequence, found in zip(ids.tolist(), exact_rows(ids, Numbers(share), table()), strict=True):
        numbers = [row for row in range(PREFIX) if sequence[row] in NUMBERS]
        rest = [row for row in range(PREFIX - 1, -1, -1) if row not in numbers]
        assert found == set((sorted(numbers, reverse=True) + rest)[: PREFIX // 2])


def test_protected_are_the_rarest_of_kept_classes() -> None:
    """Capitalised words, the rarer first, ties to the lower row."""
    ids = prompt(ROWS)
    count = 6
    kept = sorted(
        (row for row in range(PREFIX) if int(ids[0, row]) in CAPITALS), key=lambda row: (-int(ids[0, row]), row)
    )
    assert len(kept) > count
    assert exact_rows(ids, Protected(count / PREFIX), table()) == [set(kept[:count])]


def test_probe_keeps_special_tokens_before_all_others() -> None:
    """Specials come first, whatever the probe looks at; the rest of the share is the probe's."""
    ids = prompt(ROWS)
    specials = {row for row in range(PREFIX) if int(ids[0, row]) in SPECIALS}
    (found,) = exact_rows(ids, Probe(0.5, sweep=8), table())
    assert specials <= found
    assert len(found) == PREFIX // 2


def test_probe_without_a_net_needs_no_table() -> None:
    """By attention alone."""
    (found,) = exact_rows(prompt(ROWS), Probe(0.25, sweep=8, net=0), None)
    assert len(found) == PREFIX // 4


@pytest.mark.parametrize("selector", [Protected(), Numbers(), Probe()])
def test_maps_without_a_table_are_told(selector: Selector) -> None:
    """The refusal says what to calibrate with."""
    with pytest.raises(CannotFill, match=r"hold no table of them.*tokenizer="):
        exact_rows(prompt(ROWS), selector, None)
