"""The measures against brute-force restatements of their definitions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ridgefill_compile.evaluate.measures import key_tokens, kl_divergence, novel_tokens, score, token_nll


def repeated_by_definition(ids: list[int], run: int) -> list[bool]:
    """For each token: does some run that contains it equal a run that starts earlier?"""

    def occurred(start: int) -> bool:
        return any(ids[before : before + run] == ids[start : start + run] for before in range(start))

    starts = range(len(ids) - run + 1)
    return [any(occurred(start) for start in starts if start <= at < start + run) for at in range(len(ids))]


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 8))
def test_novel_tokens_follow_the_definition(ids, run):
    # Three token ids only, so that runs do repeat.
    expected = [not repeated for repeated in repeated_by_definition(ids, run)]
    assert novel_tokens(torch.tensor(ids, dtype=torch.long), run).tolist() == expected


def test_a_repeated_run_of_eight_is_not_novel_but_seven_are():
    fresh = list(range(100, 120))
    eight = torch.tensor([*range(8), *fresh, *range(8), 50])
    assert novel_tokens(eight).tolist() == [True] * 28 + [False] * 8 + [True]
    seven = torch.tensor([*range(8), *fresh, *range(7), 50])
    assert bool(novel_tokens(seven).all())


def test_shorter_than_a_run_is_all_novel():
    assert novel_tokens(torch.tensor([1, 1, 1])).tolist() == [True] * 3


@pytest.mark.parametrize(("ids", "run"), [(torch.zeros(1, 4, dtype=torch.long), 8), (torch.zeros(4), 0)])
def test_novel_tokens_refuse_what_makes_no_sense(ids, run):
    with pytest.raises(ValueError, match="one-dimensional"):
        novel_tokens(ids, run)


def test_token_nll_is_minus_log_probability():
    logits = torch.tensor([[0.0, math.log(3.0)], [5.0, 5.0]])
    expected = torch.tensor([math.log(4 / 3), math.log(2)])
    torch.testing.assert_close(token_nll(logits, torch.tensor([1, 0])), expected)


def test_kl_matches_torch_and_is_not_symmetric():
    torch.manual_seed(0)
    exact, other = torch.randn(5, 11), torch.randn(5, 11)
    expected = torch.nn.functional.kl_div(
        other.log_softmax(-1), exact.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    torch.testing.assert_close(kl_divergence(exact, other), expected)
    assert not torch.allclose(kl_divergence(other, exact), expected)


def test_a_model_scores_nothing_against_itself():
    torch.manual_seed(0)
    logits, ids = torch.randn(6, 11), torch.randint(0, 11, (20,))
    scores = score(logits, logits, ids)
    assert float(scores.delta_nll.abs().max()) == 0
    assert float(scores.kl.abs().max()) < 1e-6
    assert bool(scores.agree.all())


def test_scores_look_at_the_last_tokens_only():
    # The arm is sure of the right token where the exact model is undecided between four.
    ids = torch.tensor([0, 1, 2, 3, 0, 1])
    exact = torch.zeros(2, 4)
    other = torch.full((2, 4), -50.0)
    other[0, 0] = other[1, 1] = 50.0
    scores = score(exact, other, ids)
    torch.testing.assert_close(scores.delta_nll, torch.full((2,), -math.log(4.0)))
    assert scores.agree.tolist() == [True, False]
    assert scores.novel.shape == (2,)


def test_scores_refuse_logits_that_do_not_fit():
    with pytest.raises(ValueError, match="do not fit"):
        score(torch.zeros(3, 4), torch.zeros(2, 4), torch.zeros(9, dtype=torch.long))
    with pytest.raises(ValueError, match="do not fit"):
        score(torch.zeros(3, 4), torch.zeros(3, 4), torch.zeros(3, dtype=torch.long))


def test_key_tokens_lose_much_without_the_context():
    ids = torch.tensor([0, 1, 2, 3, 0, 1])
    exact, cut = torch.zeros(2, 4), torch.zeros(2, 4)
    exact[0, 0] = exact[1, 1] = 50.0  # sure of both; without the context, of the second alone
    cut[1, 1] = 50.0
    scores = score(exact, cut, ids)
    assert key_tokens(scores, rise=1.3).tolist() == [True, False]
    assert key_tokens(scores).tolist() == [False, False]  # log 4 is less than two nats
