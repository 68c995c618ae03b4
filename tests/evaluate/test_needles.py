"""Prompts with a number to find, answers over a cache, and what is counted of them."""

import pytest
import torch
from scipy import stats

from ridgefill_compile.evaluate.needles import Answer, compare_found, judge, needles, say
from ridgefill_compile.evaluate.texts import Window
from tests.evaluate.tiny import made_up_text, tiny_model, tiny_tokenizer

ROWS, TAIL = 320, 48


def windows(count):
    tokenizer = tiny_tokenizer()
    texts = [made_up_text(str(n)) for n in range(count)]
    return [
        Window(str(n), "prose", torch.tensor([tokenizer(text)["input_ids"][:ROWS]])) for n, text in enumerate(texts)
    ]


def test_a_prompt_holds_its_number_in_the_prefix_and_the_question_in_the_tail():
    tokenizer = tiny_tokenizer(digits=True)
    for prompt in needles(tokenizer, windows(12), TAIL):
        assert prompt.ids.shape == (1, ROWS)
        sentence = tokenizer.decode(prompt.ids[0, prompt.rows])
        assert sentence.startswith("The special number for <unk> is ")
        assert tokenizer.decode(prompt.ids[0, prompt.digit_rows]).replace(" ", "") == prompt.number
        assert len(prompt.digit_rows) == len(prompt.number) == 7
        assert set(prompt.digit_rows.tolist()) < set(prompt.rows.tolist())
        assert int(prompt.rows[-1]) < ROWS - TAIL
        asked = tokenizer.decode(prompt.ids[0, -TAIL:])
        assert "What is the special number for <unk> ? Answer with the number only . assistant" in asked
        assert asked.endswith("The special number for <unk> is")


def test_numbers_and_depths_do_not_depend_on_how_many_there_are():
    tokenizer = tiny_tokenizer(digits=True)
    few, many = (needles(tokenizer, windows(count), TAIL) for count in (4, 16))
    assert [prompt.number for prompt in few] == [prompt.number for prompt in many[:4]]
    assert [prompt.depth for prompt in few] == [prompt.depth for prompt in many[:4]]
    assert len({prompt.number for prompt in many}) == 16
    assert [prompt.number for prompt in needles(tokenizer, windows(4), TAIL, seed=1)] != [each.number for each in few]
    depths = sorted(prompt.depth for prompt in many)
    assert max(b - a for a, b in zip([0.0, *depths], [*depths, 1.0], strict=True)) < 2.7 / 16
    firsts = [int(prompt.rows[0]) for prompt in sorted(many, key=lambda prompt: prompt.depth)]
    assert firsts == sorted(firsts)


def test_a_prompt_without_room_is_refused():
    with pytest.raises(ValueError, match="no room"):
        needles(tiny_tokenizer(), windows(1), 8)
    with pytest.raises(ValueError, match="no room"):
        needles(tiny_tokenizer(), windows(1), ROWS - 4)


def test_an_answer_over_a_cache_is_what_the_model_says():
    model, ids = tiny_model(), torch.randint(0, 64, (1, 40))
    said = say(model, model, ids, 5)
    whole = ids
    for token in said:
        with torch.no_grad():
            assert int(model(whole).logits[0, -1].argmax()) == token
        whole = torch.cat([whole, torch.tensor([[token]])], dim=1)
    assert len(said) == 5
    assert say(model, model, ids, 5, {said[2]}) == said[: said.index(said[2])]


@pytest.mark.parametrize(
    ("said", "right", "found"),
    [
        (" 4815162.", 7, True),
        ("It is 4,815,162", 7, True),
        ("1. 4815162", 7, True),
        (" 4815999.", 4, False),
        (" 48", 2, False),
        ("no idea", 0, False),
        (" 481516", 6, False),
    ],
)
def test_digits_are_right_in_place(said, right, found):
    assert judge(said, "4815162") == Answer(said, right, found)


def test_arms_are_compared_prompt_by_prompt():
    yes, no = judge("1234567", "1234567"), judge("1230000", "1234567")
    found = compare_found([yes] * 8 + [no] * 2, [yes] * 2 + [no] * 6 + [yes, no])
    assert (found.found, found.samples, found.lost, found.gained) == (3, 10, 6, 1)
    assert found.digits_right == pytest.approx((3 * 7 + 7 * 3) / 70)
    assert found.p == pytest.approx(stats.binom.cdf(1, 7, 0.5) * 2)
    assert compare_found([yes], [yes]).p == 1
    with pytest.raises(ValueError, match="no answers"):
        compare_found([], [])
