"""Questions about a long text, answered by `generate`: what a user of the model sees of a fill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MARK = "\x00"
GIST = "What is the text above about? Answer in one sentence."
FACT = "Note: the access code of the archive room is 4829173."
FACT_QUESTION = "What is the access code of the archive room?"


@dataclass(frozen=True)
class Question:
    """A prompt of chosen length about a text.

    Attributes:
        text: name of the text.
        question: what is asked at the end.
        ids: `[1, N]`: the chat template around text and question.
        fact: sentence put into the text that answers the question; None where the text itself does.
    """

    text: str
    question: str
    ids: Tensor
    fact: str | None = None


def about(tokenizer: Any, name: str, text: str, question: str, rows: int, fact: str | None = None) -> Question:
    """A prompt of exactly `rows` tokens: as much of a text's beginning as fits, then the question.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        name: of the text.
        text: long enough to fill the prompt.
        question: asked after the text.
        rows: tokens of the whole prompt.
        fact: a sentence to put in after the first third of the text, as a paragraph of its own.

    Raises:
        ValueError: the text is too short.
    """
    before, after = turn(tokenizer, question)

    def tokens(part: str) -> list[int]:
        return list(tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"])

    head, tail, body = tokens(before), tokens(after), tokens(text)
    inserted = tokens(f"\n\n{fact}\n\n") if fact else []
    room = rows - len(head) - len(tail) - len(inserted)
    if not 0 < room <= len(body):
        raise ValueError(f"{name} has {len(body)} tokens, a prompt of {rows} has room for {room}")
    third = room // 3
    ids = [*head, *body[:third], *inserted, *body[third:room], *tail]
    return Question(name, question, torch.tensor([ids], dtype=torch.long), fact)


def turn(tokenizer: Any, question: str) -> tuple[str, str]:
    """The chat template around a text that a question follows: what comes before the text, and what after it."""
    messages = [{"role": "user", "content": f"{MARK}\n\n{question}"}]
    before, after = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True).split(MARK)
    return before, after


def answer(model: Any, tokenizer: Any, question: Question, new_tokens: int) -> str:
    """The model's greedy answer, at most `new_tokens` tokens of it."""
    ids = question.ids
    with torch.no_grad():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)).strip()
