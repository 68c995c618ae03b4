"""Measures of a filled prompt against the exact one that do not hide the error.

A token that repeats something said earlier in the prompt is easy for both models, and copying hides what a
filled cache lost. So the loss is taken on *novel* tokens, and everything is a difference from the exact model
on the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

RUN = 8
"""Tokens in a run: a token inside a run of this length that occurred before is not novel."""
RISE = 2.0
"""Nats by which a key token's loss rises, at least, when the context is cut (paper)."""


def novel_tokens(ids: Tensor, run: int = RUN) -> Tensor:
    """Which tokens are not inside a run of `run` tokens that already occurred earlier.

    Args:
        ids: `[N]` integer token ids.
        run: length of a run. An earlier occurrence may overlap the later one, so a long row of one token
            repeats itself.

    Returns:
        `[N]` bool; true where the token is novel. The first occurrence of a run is novel, every later one is
        not.

    Raises:
        ValueError: `ids` is not one-dimensional, or `run` is not positive.
    """
    if ids.dim() != 1 or run < 1:
        raise ValueError(f"need one-dimensional ids and a positive run, got shape {list(ids.shape)} and run {run}")
    tokens = ids.tolist()
    novel = torch.ones(len(tokens), dtype=torch.bool)
    seen: set[tuple[int, ...]] = set()
    for start in range(len(tokens) - run + 1):
        key = tuple(tokens[start : start + run])
        if key in seen:
            novel[start : start + run] = False
        seen.add(key)
    return novel


def token_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood in nats of each target: `logsumexp(logits) - logits[target]`.

    Args:
        logits: `[K, V]` of any float dtype; computed in float32.
        targets: `[K]` token ids, target `k` being the token that follows row `k`.

    Returns:
        `[K]` float32.
    """
    return torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")


def kl_divergence(exact: Tensor, other: Tensor) -> Tensor:
    """`KL(exact || other)` in nats of each row's next-token distribution.

    Args:
        exact: `[K, V]` logits of the exact model.
        other: `[K, V]` logits of the model compared with it.

    Returns:
        `[K]` float32, not below 0 but for rounding.
    """
    log_p = exact.float().log_softmax(-1)
    log_q = other.float().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


@dataclass(frozen=True)
class TokenScores:
    """One arm against the exact model on the `K` scored tokens of one window.

    Attributes:
        novel: `[K]` bool, the same for every arm of a window.
        delta_nll: `[K]` float32, this arm's loss minus the exact model's, in nats.
        kl: `[K]` float32, `KL(exact || arm)` in nats.
        agree: `[K]` bool, whether both would pick the same next token.
    """

    novel: Tensor
    delta_nll: Tensor
    kl: Tensor
    agree: Tensor


def score(exact: Tensor, other: Tensor, ids: Tensor) -> TokenScores:
    """Compare two models on the last `K` tokens of a window.

    Args:
        exact: `[K, V]` logits of the exact model at the `K` rows before the last token, in order.
        other: `[K, V]` logits of the arm at the same rows.
        ids: `[N+1]` token ids of the prompt and the one token after it, so that every scored row has a
            target.

    Returns:
        Scores of the targets `ids[-K:]`; which of them are novel is decided on the whole of `ids`.

    Raises:
        ValueError: the shapes do not fit one another.
    """
    count = exact.shape[0]
    if exact.shape != other.shape or ids.dim() != 1 or ids.shape[0] <= count:
        raise ValueError(f"logits {list(exact.shape)} and {list(other.shape)} do not fit ids {list(ids.shape)}")
    targets = ids[-count:]
    return TokenScores(
        novel=novel_tokens(ids)[-count:],
        delta_nll=token_nll(other, targets) - token_nll(exact, targets),
        kl=kl_divergence(exact, other),
        agree=exact.argmax(-1) == other.argmax(-1),
    )


def key_tokens(cut: TokenScores, rise: float = RISE) -> Tensor:
    """Which scored tokens hang on what is far back: the exact model loses more than `rise` nats without it.

    Args:
        cut: the exact model on the last rows of a prompt alone, against itself on all of it.
        rise: in nats.

    Returns:
        `[K]` bool.
    """
    return cut.delta_nll > rise
