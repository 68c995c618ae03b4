"""Confidence intervals of a mean over tokens, resampling the windows that the tokens came from.

Tokens of one window are not independent: they share a text and one filled cache. So whole windows are drawn,
each with all its tokens; a difference from the exact model is paired by construction, since both arms are
inside the window.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

RESAMPLES = 5000
CONFIDENCE = 0.95

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A figure with its confidence interval.

    Attributes:
        value: the statistic on all windows.
        low, high: ends of the interval; `None` where windows are too few or too alike for one.
    """

    value: float
    low: float | None
    high: float | None


def bootstrap(
    windows: Sequence[Array],
    statistic: Callable[[Array], Any] = np.mean,
    *,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> Interval:
    """BCa bootstrap interval of `statistic` over the pooled tokens, drawing windows with replacement.

    Args:
        windows: one `[K_w]` array of per-token values a window (or `[K_w, n]`: n values a token); windows without a
            token are left out.
        statistic: `[K] -> float` (or `[K, n] -> float`) on the concatenation of the drawn windows, such as `np.mean`
            or `np.median`.
        resamples: how many times the windows are drawn.
        confidence: share of the interval, 0.95 for 95 %.
        seed: of the draws, so that the same figures come out again.

    Returns:
        The statistic and its interval. No interval from fewer than two windows, nor where every draw gives
        the same figure: the bias correction is not defined there.

    Raises:
        ValueError: no window holds a token.
    """
    filled = [np.asarray(window, dtype=np.float64) for window in windows if len(window)]
    if not filled:
        raise ValueError("no tokens to take an interval of")
    value = float(statistic(np.concatenate(filled)))

    def of_draw(draw: NDArray[np.int64]) -> float:
        return float(statistic(np.concatenate([filled[index] for index in draw])))

    if len(filled) < 2:
        return Interval(value, None, None)
    with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        found = stats.bootstrap(
            (np.arange(len(filled)),),
            of_draw,
            vectorized=False,
            n_resamples=resamples,
            confidence_level=confidence,
            method="BCa",
            rng=np.random.default_rng(seed),
        ).confidence_interval
    if not (np.isfinite(found.low) and np.isfinite(found.high)):
        return Interval(value, None, None)
    return Interval(value, float(found.low), float(found.high))
