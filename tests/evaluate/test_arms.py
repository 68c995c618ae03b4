"""The arms on a tiny model: what they are compared with, and figures that must come out of any model."""

import pytest
import torch

from ridgefill_compile.errors import RidgefillError
from ridgefill_compile.evaluate.arms import (
    ARMS,
    LONGER_TAIL,
    arms_of,
    compare,
    last_logits,
    paired,
    removed,
    score_window,
    summarize,
)
from ridgefill_compile.evaluate.equal_cost import longer_tail
from ridgefill_compile.evaluate.measures import TokenScores
from ridgefill_compile.evaluate.texts import Window
from ridgefill_compile.maps import RidgeMaps, SplitMaps
from ridgefill_compile.report import report
from tests.evaluate.tiny import LAYERS, WIDTH, tiny_maps, tiny_model

ROWS, TAIL, SCORED = 320, 32, 24


def windows(count):
    return [Window(str(n), "prose", torch.randint(0, 64, (1, ROWS + 1))) for n in range(count)]


def test_every_arm_is_compared_with_the_exact_model():
    steps = []
    figures = compare(tiny_model(), tiny_maps(), windows(3), TAIL, SCORED, step=lambda: steps.append(1))
    assert tuple(figures) == ARMS
    assert len(steps) == 3
    for summary in figures.values():
        assert summary.scored == 3 * SCORED
        assert summary.kl_mean.value > 0
        assert 0 < summary.top1_agreement.value <= 1
        told = summary.to_dict()
        assert told["delta_nll"][0] == summary.delta_nll.value
        assert len(told["kl_median"]) == 3


def test_no_fill_may_have_the_longest_tail_that_costs_what_ridge_does():
    """As the compiled graphs' own reports count it."""
    model, ids = tiny_model(), windows(1)[0].ids[:, :-1]

    def cost(arm, tail):
        last_logits(arms_of(model, tiny_maps(), tail, arms=[arm])[arm], ids, SCORED)
        return report(model).graphs[-1].multiply_adds_filled

    longer = longer_tail(model, tiny_maps(), ROWS, TAIL)
    assert TAIL < longer < ROWS
    assert cost("none", longer) <= cost("ridge", TAIL) < cost("none", longer + 1)
    figures = compare(tiny_model(), tiny_maps(), windows(2), TAIL, SCORED, longer=longer)
    assert tuple(figures) == (*ARMS, LONGER_TAIL)
    assert figures[LONGER_TAIL].delta_nll.value != figures["none"].delta_nll.value


def test_the_oracle_loses_nothing():
    model, window = tiny_model(), windows(1)[0]
    arms = arms_of(model, tiny_maps(), TAIL, arms=("oracle",))
    scores = score_window(model, arms, window.ids, SCORED)["oracle"]
    assert float(scores.delta_nll.abs().max()) < 1e-4
    assert bool(scores.agree.all())


def test_a_prompt_that_is_not_filled_is_not_scored():
    with pytest.raises(RidgefillError, match="not filled"):
        compare(tiny_model(), tiny_maps(), windows(1), ROWS, SCORED)


def test_ridge_with_identity_maps_is_the_identity_arm():
    late = range(3, LAYERS)
    same = RidgeMaps(
        [SplitMaps(2, {n: torch.eye(WIDTH) for n in late}, {n: torch.zeros(WIDTH) for n in late})], layer_count=LAYERS
    )
    model, ids = tiny_model(), windows(1)[0].ids[:, :-1]
    logits = {arm: last_logits(forward, ids, SCORED) for arm, forward in arms_of(model, same, TAIL).items()}
    torch.testing.assert_close(logits["ridge"], logits["identity"], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(logits["none"], logits["identity"], atol=1e-4)


def test_a_summary_takes_the_loss_on_novel_tokens_only():
    novel = torch.tensor([True, False, True, False])
    one = TokenScores(
        novel=novel,
        delta_nll=torch.tensor([1.0, 9.0, 2.0, 9.0]),
        kl=torch.tensor([0.0, 0.1, 0.2, 10.0]),
        agree=torch.tensor([True, True, True, False]),
    )
    summary = summarize([one, one])
    assert summary.delta_nll.value == pytest.approx(1.5)
    assert summary.delta_nll_all.value == pytest.approx(5.25)
    assert summary.top1_agreement.value == pytest.approx(0.75)
    assert summary.kl_median.value == pytest.approx(0.15)
    assert (summary.novel, summary.scored) == (4, 8)


def test_text_that_only_repeats_itself_says_so():
    nothing = TokenScores(*(torch.zeros(3, dtype=kind) for kind in (torch.bool, torch.float, torch.float, torch.bool)))
    with pytest.raises(RidgefillError, match="no scored token is novel"):
        summarize([nothing])


def losing(*losses):
    return TokenScores(
        novel=torch.ones(len(losses)).bool(),
        delta_nll=torch.tensor(losses),
        kl=torch.zeros(len(losses)),
        agree=torch.ones(len(losses)).bool(),
    )


def test_arms_are_paired_on_the_tokens_that_count():
    arm = [losing(1.0, 2.0, 9.0), losing(3.0, 1.0, 9.0)]
    other = [losing(2.0, 6.0, 0.0), losing(4.0, 4.0, 0.0)]
    tokens = [torch.tensor([True, True, False]), torch.tensor([True, False, False])]
    assert paired(arm, other, tokens).value == pytest.approx((-1 - 4 - 1) / 3)
    assert removed(arm, other, tokens).value == pytest.approx(1 - 6 / 12)
    assert removed(other, other, tokens).value == 0
    with pytest.raises(ValueError, match="no tokens"):
        paired(arm, other, [torch.zeros(3).bool()] * 2)


def test_the_share_removed_has_an_interval_over_windows():
    torch.manual_seed(0)
    other = [losing(*torch.rand(20).tolist()) for _ in range(8)]
    arm = [losing(*(each.delta_nll * (0.4 + 0.2 * torch.rand(()))).tolist()) for each in other]
    found = removed(arm, other, [each.novel for each in other])
    assert found.low is not None
    assert found.high is not None
    assert 0.4 < found.low < found.value < found.high < 0.6
