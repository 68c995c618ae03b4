"""Retrieval from the filled region: one sentence holds a number, somewhere in the prefix, and the end asks for it."""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from ridgefill_compile.evaluate.answers import turn
from ridgefill_compile.evaluate.arms import Forward
from ridgefill_compile.evaluate.texts import Window

DIGITS = 7
SENTENCE = "The special number for {word} is {number}."
QUESTION = "What is the special number for {word}? Answer with the number only."
BEGUN = "The special number for {word} is"
"""What the answer is made to begin with: a small model says it anyway, and it costs a step each token."""
NEW_TOKENS = 12
WORDS = (
    "apple", "river", "window", "garden", "copper", "violin", "meadow", "harbor", "candle", "falcon", "marble",
    "saddle", "pepper", "lantern", "anchor", "basket", "cedar", "dragon", "engine", "feather", "glacier", "hammer",
    "island", "jacket", "kettle", "ladder", "magnet", "needle", "orchard", "pillow", "quarry", "ribbon",
)  # fmt: skip
STRIDE = (5**0.5 - 1) / 2
"""Depths go on by the golden section: evenly spread however many there are, and more do not move the first."""


@dataclass(frozen=True)
class Needle:
    """A prompt with one number to find.

    Attributes:
        text: name of the text around the sentence.
        word: what the number is asked for by.
        number: seven digits, the first not 0.
        depth: share of the filled prefix before the sentence, 0 to 1.
        ids: `[1, N]`: the chat template around text and question, and the answer begun.
        rows: `[K]` int64, positions of the sentence's tokens, all in the prefix.
        digit_rows: `[<= K]` int64, those of them that hold a digit.
    """

    text: str
    word: str
    number: str
    depth: float
    ids: Tensor
    rows: Tensor
    digit_rows: Tensor


def needles(tokenizer: Any, windows: Sequence[Window], tail: int, seed: int = 0) -> list[Needle]:
    """A prompt for each window, as long as the window, with a number at a depth of its own.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        windows: `[1, N]` each; as much of the beginning is taken as fits.
        tail: last rows that run every layer; the sentence comes before them, the question lies in them.
        seed: of the numbers. Those of the first windows do not depend on how many there are.

    Raises:
        ValueError: the question does not fit the tail, or the sentence the prefix.
    """
    found = []
    for place, window in enumerate(windows):
        number = str(random.Random(f"{seed} {place}").randrange(10 ** (DIGITS - 1), 10**DIGITS))
        depth = (0.5 + place * STRIDE) % 1.0
        found.append(hide(tokenizer, window, WORDS[place % len(WORDS)], number, depth, tail))
    return found


def hide(tokenizer: Any, window: Window, word: str, number: str, depth: float, tail: int) -> Needle:
    """A prompt as long as the window, with one sentence put into it.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        window: `[1, N]`, the text around.
        word: what the number is asked for by.
        number: digits.
        depth: share of the prefix before the sentence, as far as the template leaves room.
        tail: last rows, where the question is and the sentence is not.

    Raises:
        ValueError: the question does not fit the tail, or the sentence the prefix.
    """

    def tokens(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    opening, asking = turn(tokenizer, QUESTION.format(word=word))
    head, end = tokens(opening), tokens(asking + BEGUN.format(word=word))
    break_, sentence = tokens("\n\n"), tokens(SENTENCE.format(word=word, number=number))
    inserted = [*break_, *sentence, *break_]
    body = window.ids[0].tolist()
    count = len(body)
    latest = count - tail - len(head) - len(inserted)
    if latest < 0 or len(end) > tail:
        raise ValueError(
            f"a prompt of {count} rows with a tail of {tail} has no room for {len(head) + len(inserted)} tokens before "
            f"the tail and {len(end)} in it"
        )
    at, room = round(depth * latest), count - len(head) - len(inserted) - len(end)
    ids = [*head, *body[:at], *inserted, *body[at:room], *end]
    first = len(head) + at + len(break_)
    rows = range(first, first + len(sentence))
    digits = [row for row in rows if re.search(r"\d", tokenizer.decode([ids[row]]))]
    return Needle(window.name, word, number, depth, torch.tensor([ids]), torch.tensor(rows), torch.tensor(digits))


def say(prefill: Forward, decode: Forward, ids: Tensor, new_tokens: int, stop: Collection[int] = ()) -> list[int]:
    """The greedy answer to a prompt: one model reads it, another goes on from the cache it leaves.

    Args:
        prefill: called once, on the prompt.
        decode: called on one token after another; the exact model, since generated rows are never filled.
        ids: `[1, N]` prompt.
        new_tokens: the most tokens to say.
        stop: ids that end the answer; not part of it.
    """
    said: list[int] = []
    with torch.no_grad():
        output = prefill(input_ids=ids, use_cache=True, logits_to_keep=1)
        while (token := int(output.logits[0, -1].argmax())) not in stop:
            said.append(token)
            if len(said) == new_tokens:
                break
            output = decode(input_ids=torch.tensor([[token]]), past_key_values=output.past_key_values, use_cache=True)
    return said


@dataclass(frozen=True)
class Answer:
    """What was said, and how much of the number is in it.

    Attributes:
        said: the answer's text.
        right: digits of the number that are right in place, 0 to 7: of the answer's digits, in order, the first seven
            are held against it; all, if it is found.
        found: whether the number stands among the answer's digits, whatever is between these.
    """

    said: str
    right: int
    found: bool


def judge(said: str, number: str) -> Answer:
    """How much of a number an answer holds."""
    digits = re.sub(r"\D", "", said)
    found = number in digits
    right = len(number) if found else sum(a == b for a, b in zip(digits, number, strict=False))
    return Answer(said, right, found)


@dataclass(frozen=True)
class Retrieval:
    """An arm against the exact model on the same prompts.

    Attributes:
        found, samples: prompts whose number was found, of all.
        digits_right: mean share of a number's digits that are right in place.
        lost, gained: prompts where the exact model alone found it, and where the arm alone did.
        p: of the exact McNemar test: how likely so uneven a `lost` and `gained` would be, were both as good.
    """

    found: int
    samples: int
    digits_right: float
    lost: int
    gained: int
    p: float


def compare_found(exact: Sequence[Answer], arm: Sequence[Answer]) -> Retrieval:
    """An arm's answers against the exact model's, prompt by prompt.

    Raises:
        ValueError: there are none, or not as many of both.
    """
    pairs = list(zip(exact, arm, strict=True))
    if not pairs:
        raise ValueError("no answers to compare")
    lost = sum(theirs.found and not mine.found for theirs, mine in pairs)
    gained = sum(mine.found and not theirs.found for theirs, mine in pairs)
    return Retrieval(
        found=sum(mine.found for mine in arm),
        samples=len(pairs),
        digits_right=sum(mine.right for mine in arm) / (DIGITS * len(pairs)),
        lost=lost,
        gained=gained,
        p=float(stats.binomtest(lost, lost + gained).pvalue) if lost + gained else 1.0,
    )
