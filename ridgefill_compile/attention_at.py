"""Attention of rows at positions of their own, as one operator: the rows that a selector keeps, and the tail.

    row i sees keys 0..positions[i]

A mask says the same, but a fused kernel works through all that it hides, and which rows are selected is known only when
the graph runs. Positions ascend, so a few rows at a time need no keys behind the last one's position.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

ROWS_AT_ONCE = 192
"""On a 2-core CPU, 9 heads of 64, 768 rows scattered over 8,192 keys: 115 ms under a mask; in pieces of 384, 192 and 96
rows 81, 69 and 70 ms."""


@torch.library.custom_op("ridgefill::attention_at", mutates_args=())
def attention_at(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, positions: Tensor, scale: float | None, enable_gqa: bool
) -> Tensor:
    """Outputs of some rows.

    Args:
        query: [B, H, R, D]
        key: [B, H or fewer, N, D]
        value: [B, as key, N, V]
        mask: 0 where a row sees a key, else -inf: [R, N] or [B, 1, R, N], in the type of the query.
        positions: of the rows, ascending: int64 [R] or [B, R].
        scale: of the products; None: 1 / sqrt(D).
        enable_gqa: whether a key serves several heads.

    Returns:
        [B, H, R, V], laid out as [B, R, H, V].
    """
    batch, heads, rows, _ = query.shape
    outputs = query.new_empty(batch, rows, heads, value.shape[-1]).transpose(1, 2)
    for start in range(0, rows, ROWS_AT_ONCE):
        end = min(start + ROWS_AT_ONCE, rows)
        keys = int(positions[..., end - 1].max()) + 1
        outputs[:, :, start:end] = functional.scaled_dot_product_attention(
            query[:, :, start:end],
            key[:, :, :keys],
            value[:, :, :keys],
            mask[..., start:end, :keys],
            scale=scale,
            enable_gqa=enable_gqa,
        )
    return outputs


@attention_at.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, positions: Tensor, scale: float | None, enable_gqa: bool
) -> Tensor:
    batch, heads, rows, _ = query.shape
    return query.new_empty(batch, rows, heads, value.shape[-1]).transpose(1, 2)
