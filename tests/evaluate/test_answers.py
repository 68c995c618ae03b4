"""Prompts of an exact length around a text and a question."""

import pytest
import torch

from ridgefill_compile.evaluate.answers import FACT, FACT_QUESTION, about, answer
from tests.evaluate.tiny import made_up_text, tiny_model, tiny_tokenizer


def test_a_prompt_is_exactly_as_long_as_asked():
    tokenizer = tiny_tokenizer()
    for fact in (None, FACT):
        question = about(tokenizer, "a", made_up_text("a"), FACT_QUESTION, 200, fact)
        assert question.ids.shape == (1, 200)
        words = tokenizer.decode(question.ids[0])
        assert words.startswith("user ")
        assert words.endswith("assistant")
        assert ("is 4829173" in words) is (fact is not None)


def test_the_fact_lies_in_the_first_half():
    tokenizer = tiny_tokenizer()
    question = about(tokenizer, "a", made_up_text("a"), FACT_QUESTION, 200, FACT)
    place = question.ids[0].tolist().index(tokenizer.convert_tokens_to_ids("4829173"))
    assert 50 < place < 100


def test_a_text_too_short_for_the_prompt_is_refused():
    with pytest.raises(ValueError, match="a has 2 tokens"):
        about(tiny_tokenizer(), "a", "row tail", FACT_QUESTION, 200)


def test_an_answer_is_what_the_model_generates():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    question = about(tokenizer, "a", made_up_text("a"), FACT_QUESTION, 60)
    said = answer(model, tokenizer, question, 3)
    ids = question.ids
    for _ in range(3):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert said == tokenizer.decode(ids[0, -3:], skip_special_tokens=True).strip()
