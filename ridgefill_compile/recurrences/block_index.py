"""An index that chooses which blocks of keys each row attends to, without its loop over sequences and rows.

Of the keys that a row sees, in order, every `ratio` make a block, whose own key is the mean of theirs, normed and
rotated as their first. The row attends to the blocks that score best with its index queries,

    score(t, j) = sum_h max(0, q_th . k_j) / sqrt(D),

as many as the budget holds, and to the keys after the last whole block. Which of two blocks of equal score is taken (of
few heads, many score 0) is not defined, neither here nor in the loop.

Modelling files ask each row for the keys that it sees, which Dynamo cannot trace. Where every row of a sequence sees
all keys from the sequence's first one to one of its own (a causal mask, with padding on the left), blocks are the same
for all rows, and the loop is one product, one top-k and one scatter. Whether the mask is so is looked at when it is
known: another one is refused then, never answered wrongly.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_REFUSED = (
    "an index over blocks of keys is compiled for rows that see every key from their sequence's first on (a causal "
    "mask, with padding on the left), and this mask is another: run the model uncompiled with it"
)


@torch.library.custom_op("ridgefill::first_key", mutates_args=())
def first_key(visible: Tensor) -> Tensor:
    """The first key that each sequence's rows see.

    Args:
        visible: which keys each row sees, [B, N, K], bool.

    Returns:
        Positions [B] (0 where no row sees any).

    Raises:
        RuntimeError: some row sees other keys than all of those from the first to one of its own. On CUDA a later call
            raises it, so that nothing has to be waited for.
    """
    count = visible.sum(-1)
    begins = visible.to(torch.int8).argmax(-1)
    first = begins.masked_fill(count == 0, visible.shape[-1]).amin(-1)
    last = visible.shape[-1] - visible.flip(-1).to(torch.int8).argmax(-1)  # one behind it
    causal = (count == 0) | ((begins == first.unsqueeze(-1)) & (last - begins == count))
    torch._assert_async(causal.all(), _REFUSED)
    return torch.where(first < visible.shape[-1], first, 0)


@first_key.register_fake
def _(visible: Tensor) -> Tensor:
    return visible.new_empty(visible.shape[0], dtype=torch.int64)


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
    first, count = first_key(visible), visible.sum(-1, keepdim=True)  # [B], [B, N, 1]
    positions = torch.arange(keys.shape[1], device=keys.device) - first.unsqueeze(-1)  # of each key in its sequence
    complete = count // ratio

    blocks = (keys.shape[1] + ratio - 1) // ratio
    members = first.unsqueeze(-1) + torch.arange(blocks * ratio, device=keys.device)
    pooled = _at(keys, members).unflatten(1, (blocks, ratio)).float().mean(2).to(keys.dtype)
    begins = members[:, ::ratio]
    block_keys = _rotated(index.k_layernorm(pooled).unsqueeze(2), _at(cosines, begins), _at(sines, begins))
    scores = queries.float() @ block_keys.squeeze(2).float().mT.unsqueeze(1)  # [B, N, heads, blocks]
    scores = scores.relu().sum(2) / math.sqrt(width)

    whole = torch.arange(blocks, device=keys.device) < complete
    best = scores.masked_fill(~whole, -1.0).topk(min(index.block_topk, blocks), dim=-1).indices
    chosen = torch.zeros_like(whole).scatter(-1, best, True)  # of a block that is not whole, a row sees what is behind
    block_of = (positions // ratio).clamp(0, blocks - 1).unsqueeze(1).expand(-1, rows, -1)
    behind = positions.unsqueeze(1) >= complete * ratio
    allowed: Tensor = (chosen.gather(-1, block_of) | behind) & visible
    return allowed.unsqueeze(1)


def _at(rows: Tensor, positions: Tensor) -> Tensor:
    """`rows` [B, K, D] at positions [B, n], or the last row (only blocks that are not whole ask for more)."""
    positions = positions.clamp(max=rows.shape[1] - 1)
    return rows.gather(1, positions.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))


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
