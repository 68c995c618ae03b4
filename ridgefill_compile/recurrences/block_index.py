"""An index that chooses which blocks of keys each row attends to, without its loop over sequences and rows.

Of the keys that a row sees, in order, every `ratio` make a block, whose own key is the mean of theirs, normed and
rotated as their first. The row attends to the blocks that score best with its index queries,

    score(t, j) = sum_h max(0, q_th . k_j) / sqrt(D),

as many as the budget holds, and to the keys after the last whole block. Which of two blocks of equal score is taken (of
few heads, many score 0) is not defined, neither here nor in the loop.

Modelling files ask each row for the keys that it sees, which Dynamo cannot trace. Where all rows of a sequence see the
first so many of the same keys, each as many as it may (a causal mask, with padding anywhere), blocks are the same for
all rows, and the loop is one product, one top-k and one scatter. Whether the mask is so is looked at when it is known:
another one is refused then, never answered wrongly.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_REFUSED = (
    "an index over blocks of keys is compiled for rows that each see the first so many of the same keys (a causal "
    "mask, with padding), and this mask is another: run the model uncompiled with it"
)


@torch.library.custom_op("ridgefill::key_order", mutates_args=())
def key_order(visible: Tensor) -> Tensor:
    """Where each key comes among those that the rows of its sequence see; behind them, keys that none sees.

    Args:
        visible: which keys each row sees, [B, N, K], bool.

    Returns:
        A permutation of 0 .. K - 1 for each sequence, int64 [B, K].

    Raises:
        RuntimeError: some row sees other keys than the first so many. On CUDA it is an assertion of the device, so that
            nothing has to be waited for: a later call raises it, and the device cannot be used any more.
    """
    seen = visible.any(1)
    order = torch.where(seen, seen.cumsum(-1), seen.sum(-1, keepdim=True) + seen.logical_not().cumsum(-1)) - 1
    first = (order.unsqueeze(1) < visible.sum(-1, keepdim=True)) & seen.unsqueeze(1)
    torch._assert_async((first == visible).all(), _REFUSED)
    return order


@key_order.register_fake
def _(visible: Tensor) -> Tensor:
    return visible.new_empty(visible.shape[0], visible.shape[2], dtype=torch.int64)


def block_index(given: dict[str, Any]) -> Tensor:
    """Which keys each row may attend to, [B, 1, N, K], bool, from an index module's arguments by name.

    They are `hidden_states` [B, N, hidden], `position_embeddings` (cosines and sines of all positions so far, the new
    rows' last), `attention_mask` [B, 1, N, K] (bool, or 0 where a row sees), `cache` (of older versions:
    `past_key_values`), and the module itself.
    """
    index, hidden, (cosines, sines) = given["self"], given["hidden_states"], given["position_embeddings"]
    rows, width, ratio = hidden.shape[1], index.index_head_dim, index.compress_ratio
    sizes = [index.index_n_heads * width, index.index_kv_heads * width]
    queries, keys = index.index_qk_proj(hidden).split(sizes, -1)
    queries = index.q_layernorm(queries.unflatten(-1, (-1, width)))
    queries = _rotated(queries, cosines[:, -rows:], sines[:, -rows:])
    cache = given.get("cache", given.get("past_key_values"))
    if cache is not None:
        keys = cache.update_indexer(keys, index.layer_idx)

    mask = given["attention_mask"][:, 0]
    visible = mask if mask.dtype == torch.bool else mask == 0
    order, complete = key_order(visible), visible.sum(-1, keepdim=True) // ratio  # [B, K], [B, N, 1]

    blocks = (keys.shape[1] + ratio - 1) // ratio
    members = _at(order.argsort(-1).unsqueeze(-1), torch.arange(blocks * ratio, device=keys.device)[None]).squeeze(-1)
    pooled = _at(keys, members).unflatten(1, (blocks, ratio)).float().mean(2).to(keys.dtype)
    begins = members[:, ::ratio]
    block_keys = _rotated(index.k_layernorm(pooled).unsqueeze(2), _at(cosines, begins), _at(sines, begins))
    scores = queries.float() @ block_keys.squeeze(2).float().mT.unsqueeze(1)  # [B, N, heads, blocks]
    scores = scores.relu().sum(2) / math.sqrt(width)

    whole = torch.arange(blocks, device=keys.device) < complete
    best = scores.masked_fill(~whole, -1.0).topk(min(index.block_topk, blocks), dim=-1).indices
    chosen = torch.zeros_like(whole).scatter(-1, best, True)  # of a block that is not whole, a row sees what is behind
    block_of = (order // ratio).unsqueeze(1).expand(-1, rows, -1)
    behind = order.unsqueeze(1) >= complete * ratio
    allowed: Tensor = (chosen.gather(-1, block_of) | behind) & visible
    return allowed.unsqueeze(1)


def _at(rows: Tensor, positions: Tensor) -> Tensor:
    """`rows` [B, K, D] at positions [B or 1, n], or the last row (only blocks that are not whole ask for more)."""
    positions = positions.clamp(max=rows.shape[1] - 1).unsqueeze(-1)
    return rows.gather(1, positions.expand(rows.shape[0], -1, rows.shape[-1]))


def _rotated(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Heads [B, n, H, D], their first R entries rotated by halves; `cosines` and `sines` are [B, n, R]."""
    cosines, sines = cosines.unsqueeze(2), sines.unsqueeze(2)
    turned, rest = heads.split([cosines.shape[-1], heads.shape[-1] - cosines.shape[-1]], -1)
    low, high = turned.chunk(2, -1)
    return torch.cat([turned * cosines + torch.cat([-high, low], -1) * sines, rest], -1)


class FormerKeys:
    """A cache that holds index keys [B, K, D] of earlier rows, to hold a substitute to its loop."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        """All keys, the new ones last."""
        return torch.cat([self.keys, keys], 1)
