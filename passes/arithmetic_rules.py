"""Row rules of arithmetic: elementwise ops, reductions and norms, matrix products, attention, recurrences."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ridgefill_compile.passes.calls import (
    TO_THE_END,
    Call,
    CausalTail,
    Need,
    Rule,
    arguments,
    aten,
    broadcast,
    count,
    first_operand,
    positive,
    rewrite,
    shape,
)
from ridgefill_compile.passes.rows import Rows, at_least, same
from ridgefill_compile.passes.selected_rows import spread_rows
from ridgefill_compile.recurrences.table import RECURRENCES

# ---------------------------------------------------------------- elementwise


def pointwise(node: Node, rows: Rows) -> Call | None:
    """Every operand broadcasts against the result (or each of several)."""
    value = node.meta["val"]
    result = (value[0] if isinstance(value, list | tuple) else value).shape
    try:
        args = torch.fx.node.map_aggregate(node.args, lambda a: broadcast(a, rows, result))
        kwargs = {name: broadcast(value, rows, result) for name, value in node.kwargs.items()}
    except LookupError:
        return None
    return Call(node.target, args, kwargs)


def factory(name: str) -> Rule:
    """A constant value of a given size: make it smaller. `name`: the argument that holds the size."""

    def rule(node: Node, rows: Rows) -> Call | None:
        size = list(arguments(node)[name])
        if count(rows) is None:
            return None
        size[rows.dim] = count(rows)
        return rewrite(node, **{name: size})

    return rule


# ---------------------------------------------------------------- reductions, norms, things along one dimension


def reduction(node: Node, rows: Rows) -> Call | None:
    """Reduces `dim`; every other dimension passes."""
    given = arguments(node)
    operand = node.args[0]
    assert isinstance(operand, Node)
    rank = len(shape(operand))
    dims = given.get("dim")
    if dims is None or dims == []:
        return None
    reduced = {positive(dim, rank) for dim in ([dims] if isinstance(dims, int) else dims)}
    if given.get("keepdim", False):
        dim = rows.dim
    else:
        dim = [d for d in range(rank) if d not in reduced][rows.dim]
    if dim in reduced:
        return None
    return first_operand(node, rows.at(dim))


def along(name: str = "dim") -> Rule:
    """Works along one dimension (softmax, sort, cumsum, top-k, glu, ...); every other dimension passes."""

    def rule(node: Node, rows: Rows) -> Call | None:
        dims = arguments(node)[name]
        if dims is None or dims == []:
            return None  # along all of them at once
        rank = len(shape(node.args[0]))  # type: ignore[arg-type]
        if rows.dim in {positive(dim, rank) for dim in ([dims] if isinstance(dims, int) else dims)}:
            return None
        return first_operand(node, rows)

    return rule


def normalisation(node: Node, rows: Rows) -> Call | None:
    """Layer and RMS norm: the trailing `normalized_shape` dimensions are mixed, the others pass."""
    given = arguments(node)
    if rows.dim >= len(shape(given["input"])) - len(given["normalized_shape"]):
        return None
    return first_operand(node, rows)


# ---------------------------------------------------------------- matrix products


def linear(node: Node, rows: Rows) -> Call | None:
    """input [..., rows, d_in] x weight [d_out, d_in]."""
    return first_operand(node, rows) if rows.dim < len(shape(node)) - 1 else None


def matmul(node: Node, rows: Rows) -> Call | None:
    """[..., n, k] x [..., k, m]; a bias of `addmm` and `baddbmm` broadcasts."""
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    given = arguments(node)
    left_name, right_name = [n for n in names if n in ("mat1", "mat2", "batch1", "batch2", "other", "self")][-2:]
    left, right = given[left_name], given[right_name]
    rank, left_rank, right_rank = len(shape(node)), len(shape(left)), len(shape(right))
    if left_rank < 2 or right_rank < 2:
        return None
    changes: dict[str, Any] = {}
    try:
        if rows.dim == rank - 2:
            changes[left_name] = Need(left, rows.at(left_rank - 2))
        elif rows.dim == rank - 1:
            changes[right_name] = Need(right, rows.at(right_rank - 1))
        else:
            changes[left_name] = broadcast(left, rows, shape(node))
            changes[right_name] = broadcast(right, rows, shape(node))
        if "self" in given and "self" not in (left_name, right_name):
            changes["self"] = broadcast(given["self"], rows, shape(node))
    except LookupError:
        return None
    return rewrite(node, **changes)


def einsum(node: Node, rows: Rows) -> Call | None:
    """Explicit equations: the result's letter is narrowed wherever it occurs."""
    given = arguments(node)
    equation = given["equation"].replace(" ", "")
    if "->" not in equation or "." in equation:
        return None
    inputs, result = equation.split("->")
    letter = result[rows.dim]
    length = shape(node)[rows.dim]
    operands: list[Any] = []
    for operand, letters in zip(given["tensors"], inputs.split(","), strict=True):
        at = letters.find(letter)
        if at < 0 or (same(shape(operand)[at], 1) and not same(length, 1)):  # einsum spreads size 1, too
            operands.append(operand)
        elif letters.count(letter) == 1 and same(shape(operand)[at], length):
            operands.append(Need(operand, rows.at(at)))
        else:
            return None
    return rewrite(node, tensors=operands)


def convolution(node: Node, rows: Rows) -> Call | None:
    """conv1d over rows, [batch, channels, rows]: `last` results read `last + (kernel - 1) * dilation` rows.

    They are taken from the real rows, as far as those are not padding; what the padding in front of them spoils is cut
    off again. Samples pass.
    """
    given = arguments(node)
    operand, dilation = given["input"], given["dilation"][0]
    rank = len(shape(operand))
    if rows.dim == 0 and rank == 3:
        return first_operand(node, rows)
    padding, length = given["padding"], shape(operand)[-1]
    if rows.dim != rank - 1 or not same(rows.blocks, 1) or given["stride"] != [1] or isinstance(padding, str):
        return None
    if rows.selected is not None:
        return None
    before = (shape(given["weight"])[-1] - 1) * dilation
    last = rows.last + before - padding[0]
    if not isinstance(last, int) or last < 1 or not at_least(length, last) or not at_least(shape(node)[-1], rows.last):
        return None
    call = rewrite(node, input=Need(operand, Rows(rows.dim, last)))
    return Call(aten.slice.Tensor, (call, rows.dim, -rows.last, TO_THE_END)) if padding[0] else call


def attention(node: Node, rows: Rows) -> Call | None:
    """Query rows pass; every key and value is needed. Causal attention gets the mask of its queries."""
    given = arguments(node)
    query, key, mask = given["query"], given["key"], given.get("attn_mask")
    rank = len(shape(node))
    if given.get("dropout_p", 0.0) != 0.0:
        return None
    if rows.dim == 0 and rank > 3:
        return _samples(node, rows)
    if rows.dim != rank - 2 or not same(rows.blocks, 1):
        return None
    changes: dict[str, Any] = {"query": Need(query, rows.at(len(shape(query)) - 2))}
    if given.get("is_causal", False):
        if mask is not None or (rows.selected is not None and rows.selected.each != 1):
            return None
        changes |= {"attn_mask": CausalTail(query, key, rows), "is_causal": False}
    elif mask is not None:
        size = shape(mask)
        if not same(size[-2], 1):
            changes["attn_mask"] = Need(mask, rows.at(len(size) - 2))
    return rewrite(node, **changes)


def _samples(node: Node, rows: Rows) -> Call | None:
    """Attention of some samples: of every operand that has them."""
    given = arguments(node)
    names = [name for name in ("query", "key", "value", "attn_mask") if isinstance(given.get(name), Node)]
    try:
        return rewrite(node, **{name: broadcast(given[name], rows, shape(node)) for name in names})
    except LookupError:
        return None


# ---------------------------------------------------------------- recurrences


def recurrence(node: Node, rows: Rows) -> Call | None:
    """Rows of a scan's outputs: those of the query side. The scan itself runs over every row, to its state."""
    known = RECURRENCES[node.target]  # type: ignore[index]
    if rows.dim != known.row_dim or not same(rows.blocks, 1):
        return None
    given = arguments(node)
    if rows.selected is not None:
        found = rows.selected.batch in (None, 0) and rows.selected.each == 1
        return _outputs_in_place(node, rows) if found else None
    changes: dict[str, Any] = {name: Need(given[name], rows) for name in known.query_side}
    if known.outputs is not None:
        changes[known.outputs] = rows.last
    return rewrite(node, **changes)


def _outputs_in_place(node: Node, rows: Rows) -> Call:
    """Outputs at selected rows, between which the state moves on: queries in their places among zeros, and outputs of
    all rows, of which the reader takes its own.
    """
    known, given = RECURRENCES[node.target], arguments(node)  # type: ignore[index]
    assert rows.selected is not None
    whole = next(  # the scan's own rows
        value
        for name, value in given.items()
        if isinstance(value, Node) and name not in known.query_side and len(shape(value)) > known.row_dim
    )
    index, batch = rows.selected.index, rows.selected.batch
    changes = {
        name: Call(spread_rows, (Need(given[name], rows), index, whole, known.row_dim, rows.last, batch))
        for name in known.query_side
    }
    return rewrite(node, **changes)
