"""Attention of some rows: the mask that keeps them at their true positions.

`scaled_dot_product_attention(is_causal=True)` aligns query 0 with key 0. Run on a tail of the queries it would let the
first tail row see one key only. The mask of the tail, made once a graph and shared by all its layers, is

    mask[i, j] = 0 if j <= first + i else -inf        first = (number of queries) - last

and of selected rows, before the tail, the same with their own positions. It is added in the query's dtype: fused
kernels, on CPU and on CUDA, would turn a boolean mask into this once a layer. On CUDA some want each row of it to begin
at a multiple of 8 entries, or it is copied once a layer: so its rows lie that far apart. (Where lengths are symbolic,
torch copies it all the same.)

Calls are then written as their device runs them best:

- On CPU, where a kernel works through all that a mask hides, those of selected rows become an operator that is given
  their positions, too (`ridgefill_compile/attention_at.py`). Elsewhere reading them would wait for the device.
- On CUDA a kernel may take grouped heads without a mask alone (torch 2.13 on most GPUs). With the mask, torch would
  spell scores out, `[B, H, rows, keys]` in float32; so each head gets the keys and values that it shares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.nn.attention import SDPBackend

from ridgefill_compile import attention_at  # noqa: F401  (it registers its operator)
from ridgefill_compile.passes.calls import CAUSAL_TAIL, CausalTail, arguments, aten, shape
from ridgefill_compile.passes.emit import Emitter, copy_module, fake_mode_of
from ridgefill_compile.passes.find_attention import ATTENTION
from ridgefill_compile.passes.rows import IntLike

ALIGNED = 8  # entries
POSITIONS = "ridgefill_positions"  # meta key of a mask of selected rows: name of the node with their positions


def causal_mask(emit: Emitter, tail: CausalTail, index_of: Callable[[Node, IntLike, int], Node]) -> Node:
    """Additive mask [rows, keys] of some queries, 0 or -inf; [batch, 1, rows, keys] of each sequence's own.

    `index_of`: makes the positions of selected and last rows.
    """
    queries, keys = shape(tail.query)[-2], shape(tail.key)[-2]
    selected, last = tail.rows.selected, tail.rows.last
    value = tail.query.meta["val"]
    which = selected and (selected.index, selected.batch)
    memo = ("causal_mask", str(queries), str(keys), last, value.dtype, value.device, which)
    if memo in emit.memo:
        return emit.memo[memo]
    place = {"device": value.device, "pin_memory": False}
    sizes_known = all(isinstance(size, int) for size in (*value.shape, keys, selected.count if selected else 0))
    behind = -keys % ALIGNED if sizes_known and value.device.type != "cpu" else 0
    key_at = emit(aten.arange.default, emit.size(keys + behind), **place)
    if selected is None:
        first = emit.minus(emit.size(queries), last)
        query_at = emit(aten.add.Tensor, emit(aten.arange.default, last, **place), first)
    else:
        query_at = index_of(selected.index, queries, last)
    positions = query_at.name
    if query_at.meta["val"].device != value.device:
        query_at = emit(aten.to.device, query_at, value.device, torch.int64)
    query_at = emit(aten.unsqueeze.default, query_at, -1)
    if selected is not None and selected.batch is not None:
        query_at = emit(aten.unsqueeze.default, query_at, 1)
    hidden = emit(aten.gt.Tensor, key_at, query_at)
    zero = emit(aten.scalar_tensor.default, 0.0, dtype=value.dtype, **place)
    never = emit(aten.scalar_tensor.default, -torch.inf, dtype=value.dtype, **place)
    mask = emit(aten.where.self, hidden, never, zero)
    if behind:
        # No slice, which Inductor would make anew without what is cut off.
        mask = emit(aten.as_strided.default, mask, [*shape(mask)[:-1], keys], list(mask.meta["val"].stride()))
    emit.memo[memo] = mask
    if selected is not None:
        mask.meta[POSITIONS] = positions
    return mask


def attend(module: GraphModule) -> GraphModule:
    """A copy whose attention under a mask made here is written as its device runs it best; the module itself if it is
    already.
    """
    scattered = [node.name for node in module.graph.nodes if _is_scattered(node)]
    spelled_out = [node.name for node in module.graph.nodes if _is_spelled_out(node)]
    if not scattered and not spelled_out:
        return module
    result = copy_module(module)
    emit = Emitter(result.graph, fake_mode_of(result.graph))
    named = {node.name: node for node in result.graph.nodes}
    for name in scattered + spelled_out:
        call = named[name]
        given = arguments(call)
        if name in scattered:
            operands = [given[name] for name in ("query", "key", "value", "attn_mask")]
            positions = named[given["attn_mask"].meta[POSITIONS]]
            with result.graph.inserting_before(call):
                settings = (positions, given.get("scale"), given.get("enable_gqa", False))
                new = emit(torch.ops.ridgefill.attention_at.default, *operands, *settings, like=call)
            call.replace_all_uses_with(new)
            result.graph.erase_node(call)
        else:
            with result.graph.inserting_before(call):
                groups = shape(given["query"])[1] // shape(given["key"])[1]
                for name in ("key", "value"):
                    given[name] = emit(aten.repeat_interleave.self_int, given[name], groups, 1, like=given[name])
            call.args = tuple(given[name] for name in ("query", "key", "value", "attn_mask"))
            call.kwargs = {"scale": given.get("scale")}
    result.recompile()
    return result


def _is_scattered(node: Node) -> bool:
    """Whether a call is attention of selected rows of a prompt, under the mask that `causal_mask` made, on CPU."""
    if not _is_masked_here(node):
        return False
    given = arguments(node)
    mask, query = given["attn_mask"], given["query"]
    return device_type(query) == "cpu" and isinstance(mask, Node) and POSITIONS in mask.meta


def _is_masked_here(node: Node) -> bool:
    return node.target is ATTENTION and CAUSAL_TAIL in node.meta and len(shape(node)) == 4


def _is_spelled_out(node: Node) -> bool:
    """Whether a call of grouped heads on CUDA is one that torch has no fused kernel for under the mask that
    `causal_mask` made.
    """
    if not _is_masked_here(node):
        return False
    given = arguments(node)
    operands = [given[name] for name in ("query", "key", "value", "attn_mask")]
    if not given.get("enable_gqa", False) or device_type(given["query"]) != "cuda":
        return False
    try:
        kernel = kernel_of([operand.meta["val"] for operand in operands], given.get("scale"))
    except (RuntimeError, NotImplementedError, AssertionError):  # a torch without CUDA, say: it will not run there
        return False
    return kernel == SDPBackend.MATH.value


def device_type(node: Node) -> str:
    """Of the device that a value lies on: "cpu", "cuda", .."""
    return str(node.meta["val"].device.type)


def kernel_of(operands: Sequence[Tensor], scale: float | None) -> int:
    """The number of the kernel that torch would run for query, key, value and mask, of grouped heads."""
    with FakeTensorMode():  # of plain sizes: what it looks at must not become a condition on symbolic ones
        like = [
            torch.empty_strided([*map(_hint, x.shape)], [*map(_hint, x.stride())], dtype=x.dtype, device=x.device)
            for x in operands
        ]
        query, key, value, mask = like
        chosen: int = torch._fused_sdp_choice(query, key, value, mask, 0.0, False, scale=scale, enable_gqa=True)
        return chosen


def _hint(size: IntLike) -> int:
    return size if isinstance(size, int) else int(size.node.hint)
