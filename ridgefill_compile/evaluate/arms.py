"""The arms of a fill on held-out text: what none, identity and ridge lose against the exact model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ridgefill_compile.errors import CannotFill, RidgefillError, RidgefillWarning
from ridgefill_compile.evaluate.intervals import Interval, bootstrap
from ridgefill_compile.evaluate.measures import TokenScores, score
from ridgefill_compile.evaluate.speed import filled_graph
from ridgefill_compile.evaluate.texts import Window
from ridgefill_compile.maps import RidgeMaps
from ridgefill_compile.report import report

ARMS = ("none", "identity", "ridge")
CORRECTED = "ridge_corrected"
"""Ridge with the states of late recurrences corrected; an arm of maps that hold what to correct them by."""
LONGER_TAIL = "none_longer_tail"
"""No fill, and a tail as long as costs what ridge does."""
SCORED = 256
"""Tokens scored at the end of a window."""

Forward = Callable[..., Any]
K = TypeVar("K")


@dataclass(frozen=True)
class ArmSummary:
    """An arm against the exact model over all windows, each figure with its interval over windows.

    Attributes:
        delta_nll: loss over the exact model's on novel tokens, in nats.
        delta_nll_all: the same on every scored token.
        top1_agreement: share of scored tokens where both would pick the same token.
        kl_mean, kl_median: of `KL(exact || arm)` over scored tokens, in nats.
        novel, scored: tokens of each sort.
    """

    delta_nll: Interval
    delta_nll_all: Interval
    top1_agreement: Interval
    kl_mean: Interval
    kl_median: Interval
    novel: int
    scored: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, for JSON; an interval is `[value, low, high]`."""
        return {
            name: [value.value, value.low, value.high] if isinstance(value, Interval) else value
            for name, value in vars(self).items()
        }


def arms_of(
    model: Any, maps: RidgeMaps, tail: int, inner: str = "eager", arms: Sequence[str] | None = None
) -> dict[str, Forward]:
    """Each arm as a function called like the model; compiled when first called.

    Args:
        model: a transformers model for causal language modelling.
        maps: their default split is the split of every arm.
        tail: last rows that run every layer exactly.
        inner: compiler behind the rewriting. "eager" costs no compile time, and on a CPU runs about as fast.
        arms: routes wanted. Default: all of `ARMS`, and `CORRECTED` where the maps allow it.

    The functions raise `RidgefillError` where a prompt was not filled, and say why.
    """
    torch._dynamo.reset()  # many splits and arms in one process would add up to the recompilation limit
    options = {"maps": maps, "split": maps.split, "tail": tail, "inner": inner, "strict": True}
    wanted: dict[str, dict[str, Any]] = {arm: {"route": arm} for arm in arms or ARMS}
    if arms is None and any(maps.state_difference(layer) is not None for layer in maps.layers):
        wanted[CORRECTED] = {"route": "ridge", "state_correction": 1.0}
    return {arm: filling(model, {**options, **own}) for arm, own in wanted.items()}


def filling(model: Any, options: Mapping[str, Any]) -> Forward:
    """The model compiled with the backend, as a function that raises where a prompt was not filled.

    Otherwise a prompt that is too short to fill would be scored as a fill that loses nothing.
    """
    compiled: Any = torch.compile(model, backend="ridgefill", options=dict(options))

    def forward(**inputs: Any) -> Any:
        before = len(report(model).graphs)
        output = compiled(**inputs)
        if new := report(model).graphs[before:]:
            filled_graph(new)
        return output

    return forward


def score_window(model: Forward, arms: Mapping[K, Forward], ids: Tensor, scored: int = SCORED) -> dict[K, TokenScores]:
    """Every arm against the exact model on the last tokens of one window.

    Args:
        model: the exact model.
        arms: see `arms_of`.
        ids: `[1, N+1]` token ids; the first `N` are the prompt.
        scored: tokens scored, at most the tail of the fill: other rows of a filled prompt have no logits.
    """
    exact = last_logits(model, ids[:, :-1], scored)
    return {arm: score(exact, last_logits(forward, ids[:, :-1], scored), ids[0]) for arm, forward in arms.items()}


def last_logits(forward: Forward, ids: Tensor, count: int) -> Tensor:
    """Logits of the last `count` rows of a prompt, `[count, V]`."""
    with torch.no_grad():
        return forward(input_ids=ids, use_cache=True, logits_to_keep=count).logits[0]  # type: ignore[no-any-return]


def compare(
    model: Any,
    maps: RidgeMaps,
    windows: Iterable[Window],
    tail: int,
    scored: int = SCORED,
    *,
    longer: int | None = None,
    inner: str = "eager",
    step: Callable[[], None] = lambda: None,
) -> dict[str, ArmSummary]:
    """Every arm against the exact model over windows of text.

    Args:
        model: a transformers model for causal language modelling.
        maps: their default split is the split of every arm.
        windows: `[1, N+1]` token ids each; the first `N` are the prompt.
        tail: last rows that run every layer exactly.
        scored: tokens scored at the end of each window, at most `tail`.
        longer: tail of the arm `LONGER_TAIL` (see `equal_cost`); None: there is no such arm.
        inner: see `arms_of`.
        step: called after every window.

    Warns:
        RidgefillWarning: there is no arm "none", since this model has late layers whose prefix cannot be hidden.
    """
    arms = arms_of(model, maps, tail, inner)
    if longer is not None:
        arms |= {LONGER_TAIL: arms_of(model, maps, longer, inner, ["none"])["none"]}
    scores: dict[str, list[TokenScores]] = {arm: [] for arm in arms}
    for window in windows:
        try:
            found = score_window(model, arms, window.ids, scored)
        except CannotFill as refusal:
            if "none" not in arms or "'none'" not in refusal.reason:
                raise
            warnings.warn(f"there is no arm without a fill: {refusal}", RidgefillWarning, stacklevel=2)
            for arm in {"none", LONGER_TAIL} & arms.keys():
                del arms[arm], scores[arm]
            found = score_window(model, arms, window.ids, scored)
        for arm, each in found.items():
            scores[arm].append(each)
        step()
    return {arm: summarize(found) for arm, found in scores.items()}


def summarize(windows: Iterable[TokenScores]) -> ArmSummary:
    """One arm's figures from its scores on every window.

    Raises:
        RidgefillError: no scored token is novel, as in text that only repeats itself.
    """
    scores = list(windows)
    novel = [each.delta_nll[each.novel].numpy() for each in scores]
    if not any(map(len, novel)):
        raise RidgefillError("no scored token is novel: all text at the windows' ends repeats what came before")
    kl = [each.kl.numpy() for each in scores]
    return ArmSummary(
        delta_nll=bootstrap(novel),
        delta_nll_all=bootstrap([each.delta_nll.numpy() for each in scores]),
        top1_agreement=bootstrap([each.agree.double().numpy() for each in scores]),
        kl_mean=bootstrap(kl),
        kl_median=bootstrap(kl, np.median),
        novel=sum(map(len, novel)),
        scored=sum(map(len, kl)),
    )


def paired(arm: Sequence[TokenScores], other: Sequence[TokenScores], tokens: Sequence[Tensor]) -> Interval:
    """An arm's loss minus another's on the same tokens, in nats, with its interval over windows.

    Args:
        arm: scores on every window.
        other: of another arm on the same windows.
        tokens: `[K]` bool a window, the tokens that count.

    Raises:
        ValueError: no token counts.
    """
    both = zip(arm, other, tokens, strict=True)
    return bootstrap([(a.delta_nll - b.delta_nll)[which].numpy() for a, b, which in both])


def removed(arm: Sequence[TokenScores], other: Sequence[TokenScores], tokens: Sequence[Tensor]) -> Interval:
    """Share of another arm's loss over exact that an arm does not have: 1 if it is exact, below 0 if it is worse.

    Args:
        arm: see `paired`.
        other: see `paired`.
        tokens: see `paired`.

    Raises:
        ValueError: no token counts.
    """
    both = zip(arm, other, tokens, strict=True)
    return bootstrap(
        [torch.stack([a.delta_nll, b.delta_nll], 1)[which].numpy() for a, b, which in both],
        lambda losses: 1 - losses[:, 0].mean() / losses[:, 1].mean(),
    )
