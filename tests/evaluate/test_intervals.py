"""The bootstrap against closed forms and known cases."""

import numpy as np
import pytest
from scipy import stats

from ridgefill_compile.evaluate.intervals import Interval, bootstrap


def test_the_mean_weighs_tokens_not_windows():
    assert bootstrap([np.array([1.0]), np.array([3.0, 3.0, 3.0])], resamples=50).value == 2.5


def test_normal_windows_give_about_the_normal_interval():
    means = np.random.default_rng(0).normal(size=60)
    found = bootstrap([np.full(7, mean) for mean in means], resamples=3000)
    half = stats.norm.ppf(0.975) * means.std(ddof=1) / np.sqrt(len(means))
    assert found.low == pytest.approx(means.mean() - half, abs=0.12 * half)
    assert found.high == pytest.approx(means.mean() + half, abs=0.12 * half)


def test_windows_are_drawn_whole():
    # Tokens of one window agree, so more of them tell nothing new.
    means = np.random.default_rng(1).normal(size=20)
    few = bootstrap([np.full(2, mean) for mean in means], resamples=1000)
    many = bootstrap([np.full(200, mean) for mean in means], resamples=1000)
    assert (few.low, few.high) == pytest.approx((many.low, many.high))


def test_it_is_bca():
    # Skewed: the interval leans the way the sample does, which the percentile interval of the mean does not
    # follow.
    sample = np.random.default_rng(2).exponential(size=25)
    found = bootstrap([np.array([value]) for value in sample], resamples=4000)
    expected = stats.bootstrap(
        (sample,), np.mean, n_resamples=4000, method="BCa", rng=np.random.default_rng(0)
    ).confidence_interval
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert found.high is not None
    assert found.low is not None
    assert found.high - found.value > found.value - found.low


def test_any_statistic_and_the_same_draws_again():
    windows = [np.random.default_rng(seed).normal(size=9) for seed in range(8)]
    first = bootstrap(windows, np.median, resamples=300)
    assert first == bootstrap(windows, np.median, resamples=300)
    assert first.value == np.median(np.concatenate(windows))
    assert first != bootstrap(windows, np.median, resamples=300, seed=1)


def test_no_interval_where_none_is_defined():
    assert bootstrap([np.array([1.0, 2.0])]) == Interval(1.5, None, None)
    assert bootstrap([np.array([1.0]), np.array([1.0]), np.array([])]) == Interval(1.0, None, None)


def test_no_tokens_at_all_is_an_error():
    with pytest.raises(ValueError, match="no tokens"):
        bootstrap([np.array([])])
