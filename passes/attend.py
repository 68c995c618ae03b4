"""Attention of some rows: the mask that keeps them at their true positions.

`scaled_dot_product_attention(is_causal=True)` aligns query 0 with key 0. Run on a tail of the queries it would let the
first tail row see one key only. The mask of the tail, made once a graph and shared by all its layers, is

    mask[i, j] = 0 if j <= first + i else -inf        first = (number of queries) - last

and of selected rows, before the tail, the same with their own positions. It is added in the query's dtype: the CPU's
fused kernel would turn a boolean mask into this once a layer.

On CPU, where a kernel works through all that a mask hides, calls of selected rows are then written as an operator that
is given their positions, too (`ridgefill_compile/attention_at.py`). Elsewhere reading them would wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

from ridgefill_compile import attention_at  # noqa: F401  (it registers its operator)
from ridgefill_compile.passes.calls import CAUSAL_TAIL, CausalTail, arguments, aten, shape
from ridgefill_compile.passes.emit import Emitter, copy_module, fake_mode_of
from ridgefill_compile.passes.find_attention import ATTENTION
from ridgefill_compile.passes.rows import IntLike

POSITIONS = "ridgefill_positions"  # meta key of a mask of selected rows: name of the node with their positions


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
    positions = query_at.name
    query_at = emit(aten.unsqueeze.default, query_at, -1)
    if selected is not None and selected.batch is not None:
        query_at = emit(aten.unsqueeze.default, query_at, 1)
    hidden = emit(aten.gt.Tensor, key_at, query_at)
    zero = emit(aten.scalar_tensor.default, 0.0, dtype=value.dtype, **place)
    never = emit(aten.scalar_tensor.default, -torch.inf, dtype=value.dtype, **place)
    mask = emit(aten.where.self, hidden, never, zero)
    emit.memo[memo] = mask
    if selected is not None:
        mask.meta[POSITIONS] = positions
    return mask


def write_positions(module: GraphModule) -> GraphModule:
    """A copy whose causal attention of selected rows, on CPU, is given their positions; the module itself if it has
    none.
    """
    if not any(_is_scattered(node) for node in module.graph.nodes):
        return module
    result = copy_module(module)
    emit = Emitter(result.graph, fake_mode_of(result.graph))
    named = {node.name: node for node in result.graph.nodes}
    for call in list(result.graph.nodes):
        if not _is_scattered(call):
            continue
        given = arguments(call)
        operands = [given[name] for name in ("query", "key", "value", "attn_mask")]
        positions = named[given["attn_mask"].meta[POSITIONS]]
        with result.graph.inserting_before(call):
            settings = (positions, given.get("scale"), given.get("enable_gqa", False))
            new = emit(torch.ops.ridgefill.attention_at.default, *operands, *settings, like=call)
        call.replace_all_uses_with(new)
        result.graph.erase_node(call)
    result.recompile()
    return result


def _is_scattered(node: Node) -> bool:
    """Whether a call is attention of selected rows of a prompt, under the mask that `causal_mask` made, on CPU."""
    if node.target is not ATTENTION or CAUSAL_TAIL not in node.meta or len(shape(node)) != 4:
        return False
    given = arguments(node)
    mask, query = given["attn_mask"], given["query"]
    on_cpu: bool = query.meta["val"].device.type == "cpu"
    return on_cpu and isinstance(mask, Node) and POSITIONS in mask.meta
