"""Attention of rows at positions of their own, as one operator: the rows that a selector keeps, and the tail.

    row i sees keys 0..positions[i]

A mask says the same, but a fused kernel works through all that it hides, and which rows are selected is known only when
the graph runs. Positions ascend. So of a few rows at a time, all see the keys before the first one's position, and none
those behind the last one's: only between the two is a mask needed. Without one, the heads that share a key are rows of
one call. The two parts are joined by what their softmaxes divide by.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

ROWS_AT_ONCE = 192
"""On a 2-core CPU, 9 heads of 64 that share 3 keys: 768 rows scattered over 7,680 and the 512 behind them take 133, 131
and 139 ms at 128, 192 and 256 rows at once; with rows mostly late in the prompt, 153, 154 and 158 ms."""


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
    batch, heads, rows, size = query.shape
    outputs = query.new_empty(batch, rows, heads, value.shape[-1]).transpose(1, 2)
    scale = size**-0.5 if scale is None else scale
    groups = heads // key.shape[1]
    query, key, value = _as_the_kernel_reads(query, key, value)
    first, last = positions.reshape(-1, rows).amin(0).tolist(), positions.reshape(-1, rows).amax(0).tolist()
    for start in range(0, rows, ROWS_AT_ONCE):
        end = min(start + ROWS_AT_ONCE, rows)
        seen, some = first[start], last[end - 1] + 1
        mine = query[:, :, start:end].unflatten(1, (-1, groups)).flatten(2, 3).contiguous()
        hidden = mask[..., start:end, seen:some].reshape(-1, 1, end - start, some - seen).repeat(1, 1, groups, 1)
        found = _attention(mine, key[:, :, seen:some], value[:, :, seen:some], hidden, scale)
        if seen:
            found = _joined(found, _attention(mine, key[:, :, :seen], value[:, :, :seen], None, scale))
        outputs[:, :, start:end] = found[0].unflatten(2, (groups, -1)).flatten(1, 2)[..., : outputs.shape[-1]]
    return outputs


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Outputs [B, H, R, D], and the logarithm of what the softmax divides by, float32 [B, H, R, 1]."""
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    outputs, logarithm = run(query, key, value, 0.0, False, attn_mask=mask, scale=scale)
    return outputs, logarithm.unsqueeze(-1)


def _joined(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both, which have none in common."""
    share = torch.sigmoid(one[1] - other[1])
    outputs = torch.lerp(other[0].to(share.dtype), one[0].to(share.dtype), share)
    return outputs.to(one[0].dtype), torch.logaddexp(one[1], other[1])


def _as_the_kernel_reads(*tensors: Tensor) -> list[Tensor]:
    """With zeros behind their last dimension, where another one's is longer; its entries side by side in memory, which
    the kernel takes for granted.
    """
    size = max(tensor.shape[-1] for tensor in tensors)
    padded = [functional.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x for x in tensors]
    return [x if x.stride(-1) == 1 else x.contiguous() for x in padded]


@attention_at.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, positions: Tensor, scale: float | None, enable_gqa: bool
) -> Tensor:
    batch, heads, rows, _ = query.shape
    return query.new_empty(batch, rows, heads, value.shape[-1]).transpose(1, 2)
