"""Attention of some rows: the mask that keeps them at their true positions.

`scaled_dot_product_attention(is_causal=True)` aligns query 0 with key 0. Run on a tail of the queries it would let the
first tail row see one key only. The mask of the tail, made once a graph and shared by all its layers, is

    mask[i, j] = 0 if j <= first + i else -inf        first = (number of queries) - last

and of selected rows, before the tail, the same with their own positions. It is added in the query's dtype: the CPU's
fused kernel would turn a boolean mask into this once a layer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node

from ridgefill_compile.passes.calls import CausalTail, aten, shape
from ridgefill_compile.passes.emit import Emitter
from ridgefill_compile.passes.rows import IntLike


def causal_mask(emit: Emitter, tail: CausalTail, index_of: Callable[[Node, IntLike, int], Node]) -> Node:
    """Additive mask [rows, keys] of some queries, 0 or -inf; [batch, 1, rows, keys] of each sequence's own.

    `index_of`: makes the positions of selected and last rows.
    """
    queries, keys = shape(tail.query)[-2], shape(tail.key)[-2]
    selected, last = tail.rows.selected, tail.rows.last
    value = tail.query.meta["val"]
    memo = ("causal_mask", str(queries), str(keys), last, value.dtype, selected and (selected.index, selected.batch))
    if memo in emit.memo:
        return emit.memo[memo]
    place = {"device": value.device, "pin_memory": False}
    key_at = emit(aten.arange.default, emit.size(keys), **place)
    if selected is None:
        first = emit.minus(emit.size(queries), last)
        query_at = emit(aten.add.Tensor, emit(aten.arange.default, last, **place), first)
    else:
        query_at = index_of(selected.index, queries, last)
    query_at = emit(aten.unsqueeze.default, query_at, -1)
    if selected is not None and selected.batch is not None:
        query_at = emit(aten.unsqueeze.default, query_at, 1)
    hidden = emit(aten.gt.Tensor, key_at, query_at)
    zero = emit(aten.scalar_tensor.default, 0.0, dtype=value.dtype, **place)
    never = emit(aten.scalar_tensor.default, -torch.inf, dtype=value.dtype, **place)
    mask = emit(aten.where.self, hidden, never, zero)
    emit.memo[memo] = mask
    return mask
