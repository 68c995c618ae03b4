"""Attention of the last rows: the mask that keeps them at their true positions.

`scaled_dot_product_attention(is_causal=True)` aligns query 0 with key 0. Run on a tail of the queries it would let the
first tail row see one key only. The tail's own mask, made once a graph and shared by all its layers, is

    mask[i, j] = 0 if j <= first + i else -inf        first = (number of queries) - last

added in the query's dtype: the CPU's fused kernel would turn a boolean mask into this once a layer.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from ridgefill_compile.passes.calls import CausalTail, aten, shape
from ridgefill_compile.passes.emit import Emitter


def causal_tail_mask(emit: Emitter, tail: CausalTail) -> Node:
    """Additive mask [last, keys] of the last queries, 0 or -inf."""
    queries, keys = shape(tail.query)[-2], shape(tail.key)[-2]
    value = tail.query.meta["val"]
    memo = ("causal_tail_mask", str(queries), str(keys), tail.last, value.dtype)
    if memo in emit.memo:
        return emit.memo[memo]
    place = {"device": value.device, "pin_memory": False}
    first = emit.minus(emit.size(queries), tail.last)
    key_at = emit(aten.arange.default, emit.size(keys), **place)
    query_at = emit(aten.add.Tensor, emit(aten.arange.default, tail.last, **place), first)
    hidden = emit(aten.gt.Tensor, key_at, emit(aten.unsqueeze.default, query_at, 1))
    zero = emit(aten.scalar_tensor.default, 0.0, dtype=value.dtype, **place)
    never = emit(aten.scalar_tensor.default, -torch.inf, dtype=value.dtype, **place)
    mask = emit(aten.where.self, hidden, never, zero)
    emit.memo[memo] = mask
    return mask
