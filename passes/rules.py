"""The table of row rules: for each op, what the last rows of its result need of its operands.

A rule answers one question, which is arithmetic and nothing else: *if only these rows of the result are wanted, which
call computes them, and of which operands are only some rows needed?* It returns that call, with every operand that
can be narrowed wrapped in `Need`; plain operands are needed whole. So one entry owns both the analysis (what is
demanded of whom) and the rewrite (how to compute less), and each is held to the commuting square

    op(x)[rows]  ==  rule(op)(x[rows])

by `tests/passes/test_rules.py`, on sizes chosen to collide. A rule that cannot tell returns None, as does an op that is
not in the table: then the op runs on all rows, its operands are needed whole, and the reader takes its slice. That is
always right, and only slow.

Pointwise ops are recognised by `torch.Tag.pointwise`; everything else is one line of `RULES`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ridgefill_compile.passes.rows import IntLike, Rows, at_least, same

aten = torch.ops.aten
TO_THE_END = 2**63 - 1  # what `x[a:]` traces to
CAUSAL_TAIL = "ridgefill_causal_tail"  # meta key of an attention call whose mask is a `CausalTail`: (queries, last)


class Need(NamedTuple):
    """An operand of which only `rows` are needed."""

    node: Node
    rows: Rows


class CausalTail(NamedTuple):
    """The mask of the last `last` queries of causal attention: query i sees keys 0..i (aligned at the top left)."""

    query: Node
    key: Node
    last: int


@dataclass
class Call:
    """The narrowed computation. `target` None: the operand in `args[0]` is already the answer."""

    target: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


Rule = Callable[[Node, Rows], Call | None]


def rule_for(node: Node) -> Rule | None:
    """The rule of this node's op, or None."""
    if node.op != "call_function":
        return None
    rule = RULES.get(node.target)
    if rule is not None:
        return rule
    tags = getattr(node.target, "tags", ())
    if torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags:
        return pointwise
    return None


# ---------------------------------------------------------------- reading and rewriting calls


def shape(node: Node) -> tuple[IntLike, ...]:
    """Shape of a node's (fake) value."""
    return tuple(node.meta["val"].shape)


def arguments(node: Node) -> dict[str, Any]:
    """A node's arguments by the name its schema gives them, defaults included."""
    bound: dict[str, Any] = {}
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if position < len(node.args) and not argument.kwarg_only:
            bound[argument.name] = node.args[position]
        elif argument.name in node.kwargs:
            bound[argument.name] = node.kwargs[argument.name]
        elif argument.has_default_value():
            bound[argument.name] = argument.default_value
    return bound


def rewrite(node: Node, **changes: Any) -> Call:
    """The node's own call with some arguments changed by name."""
    given = arguments(node)
    given.update(changes)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in node.target._schema.arguments:  # type: ignore[union-attr]
        if argument.kwarg_only:
            default = argument.default_value if argument.has_default_value() else None
            if argument.name in given and (given[argument.name] is not default or argument.name in node.kwargs):
                kwargs[argument.name] = given[argument.name]
        elif argument.name in given:
            args.append(given[argument.name])
    return Call(node.target, tuple(args), kwargs)


def broadcast(operand: Any, rows: Rows, result: Sequence[IntLike]) -> Any:
    """An operand of a broadcasting op: `Need` where it has these rows, plain where it is spread over them.

    Raises:
        LookupError: it cannot be told which, for symbolic sizes.
    """
    if not isinstance(operand, Node) or not isinstance(operand.meta.get("val"), torch.Tensor):
        return operand
    size = shape(operand)
    dim = rows.dim - (len(result) - len(size))
    if dim < 0 or (same(size[dim], 1) and not same(result[rows.dim], 1)):
        return operand
    if same(size[dim], result[rows.dim]):
        return Need(operand, rows.at(dim))
    raise LookupError


def positive(dim: int, rank: int) -> int:
    """A dimension counted from 0."""
    return dim + rank if dim < 0 else dim


def count(rows: Rows) -> int | None:
    """How many entries the rows are, where that is a plain number."""
    return rows.last * rows.blocks if isinstance(rows.blocks, int) else None


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


def first_operand(node: Node, rows: Rows) -> Call:
    """The first operand is narrowed (on `rows.dim`, a dimension of the operand), the others are settings."""
    operand = node.args[0]
    assert isinstance(operand, Node)
    return Call(node.target, (Need(operand, rows), *node.args[1:]), dict(node.kwargs))


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


def attention(node: Node, rows: Rows) -> Call | None:
    """Query rows pass; every key and value is needed. Causal attention gets the mask of its last queries."""
    given = arguments(node)
    query, key, mask = given["query"], given["key"], given.get("attn_mask")
    rank = len(shape(node))
    if rows.dim != rank - 2 or not same(rows.blocks, 1) or given.get("dropout_p", 0.0) != 0.0:
        return None
    changes: dict[str, Any] = {"query": Need(query, rows.at(len(shape(query)) - 2))}
    if given.get("is_causal", False):
        if mask is not None:
            return None
        changes |= {"attn_mask": CausalTail(query, key, rows.last), "is_causal": False}
    elif mask is not None:
        size = shape(mask)
        if not same(size[-2], 1):
            changes["attn_mask"] = Need(mask, rows.at(len(size) - 2))
    return rewrite(node, **changes)


# ---------------------------------------------------------------- shapes


def product(sizes: Sequence[IntLike]) -> IntLike:
    """Product of sizes, symbolic or not."""
    total: IntLike = 1
    for size in sizes:
        total = total * size
    return total


def same_rows_in(rows: Rows, result: Sequence[IntLike], source: Sequence[IntLike]) -> Rows | None:
    """Where rows of a reshaped value lie in its source.

    In memory order the rows are: `outer` groups, of each the last `last` of `length` entries, each `inner` elements
    long. That does not depend on the shape, so it is enough to find the source dimension with the same three numbers.

        [B, N, H * D] -> [B, N, H, D]   rows on dim 1 -> dim 1
        [B, N, d]     -> [B * N, d]     rows on dim 0 in B blocks -> dim 1
        [B * N, d]    -> [B, N, d]      rows on dim 1 -> dim 0 in B blocks
    """
    length = result[rows.dim] // rows.blocks
    outer = product(result[: rows.dim]) * rows.blocks
    for dim in range(len(source)):
        before = product(source[:dim])
        if same(before, outer) and same(source[dim], length):
            return Rows(dim, rows.last)
        blocks = outer if same(before, 1) else outer // before
        if same(before * blocks, outer) and same(source[dim], blocks * length):
            return Rows(dim, rows.last, blocks)
    return None


def reshape(node: Node, rows: Rows) -> Call | None:
    """view, reshape, flatten: found by memory order; the narrowed size is left to be inferred.

    A view becomes a reshape: the last rows of a value, cut out of the whole, are no longer contiguous.
    """
    operand = node.args[0]
    assert isinstance(operand, Node)
    source = same_rows_in(rows, shape(node), shape(operand))
    if source is None:
        return None
    given = arguments(node)
    name = next((n for n in ("size", "shape") if n in given), None)
    if name is None:  # flatten: takes no sizes
        return first_operand(node, source)
    sizes: list[Any] = list(given[name])
    for dim, size in enumerate(sizes):
        if size == -1 and dim != rows.dim:
            known = shape(node)[dim]
            if not isinstance(known, int):
                if count(rows) is None:
                    return None
                sizes[rows.dim] = count(rows)
                break
            sizes[dim] = known
    else:
        sizes[rows.dim] = -1
    return Call(aten.reshape.default, (Need(operand, source), sizes))


def expand(node: Node, rows: Rows) -> Call | None:
    """A dimension of size 1 is spread; the others pass."""
    given = arguments(node)
    operand, sizes = given["self"], list(given["size"])
    dim = rows.dim - (len(sizes) - len(shape(operand)))
    if dim >= 0 and same(shape(operand)[dim], shape(node)[rows.dim]):
        sizes[rows.dim] = -1
        return rewrite(node, self=Need(operand, rows.at(dim)), size=sizes)
    if count(rows) is None or (dim >= 0 and not same(shape(operand)[dim], 1)):
        return None
    sizes[rows.dim] = count(rows)
    return rewrite(node, size=sizes)


def permutation(order: Callable[[Node, int], Sequence[int]]) -> Rule:
    """Dimensions change places. `order(node, rank)[i]`: where dimension i of the result comes from."""

    def rule(node: Node, rows: Rows) -> Call | None:
        return first_operand(node, rows.at(order(node, len(shape(node)))[rows.dim]))

    return rule


def _permute(node: Node, rank: int) -> list[int]:
    return [positive(dim, rank) for dim in arguments(node)["dims"]]


def _transpose(node: Node, rank: int) -> list[int]:
    order = list(range(rank))
    a, b = (positive(dim, rank) for dim in list(arguments(node).values())[1:])
    order[a], order[b] = order[b], order[a]
    return order


def _reverse_last_two(node: Node, rank: int) -> list[int]:
    return [*range(rank - 2), rank - 1, rank - 2] if rank > 1 else [0]


def unsqueeze(node: Node, rows: Rows) -> Call | None:
    """A new dimension of size 1."""
    new = positive(arguments(node)["dim"], len(shape(node)))
    if rows.dim == new:
        return None
    return first_operand(node, rows.at(rows.dim - (rows.dim > new)))


def squeeze(node: Node, rows: Rows) -> Call | None:
    """One dimension of size 1 goes (or stays, where it is longer)."""
    operand = node.args[0]
    assert isinstance(operand, Node)
    rank = len(shape(operand))
    gone = positive(arguments(node)["dim"], rank)
    if len(shape(node)) == rank:
        return first_operand(node, rows) if rows.dim != gone else None
    return first_operand(node, rows.at(rows.dim + (rows.dim >= gone)))


def select(node: Node, rows: Rows) -> Call | None:
    """One entry of one dimension; the others pass."""
    operand = node.args[0]
    assert isinstance(operand, Node)
    gone = positive(arguments(node)["dim"], len(shape(operand)))
    return first_operand(node, rows.at(rows.dim + (rows.dim >= gone)))


def reaches_the_end(node: Node) -> bool:
    """Whether a slice keeps its operand's last entry."""
    given = arguments(node)
    end, dim = given["end"], positive(given["dim"], len(shape(node)))
    value = end.meta["val"] if isinstance(end, Node) else end
    if value is None or (isinstance(value, int) and value == TO_THE_END):
        return True
    return at_least(value, shape(given["self"])[dim])


def slice_(node: Node, rows: Rows) -> Call | None:
    """Other dimensions pass; the last rows of `x[a:]` are the last rows of x."""
    given = arguments(node)
    if rows.dim != positive(given["dim"], len(shape(node))):
        return first_operand(node, rows)
    long_enough = at_least(shape(node)[rows.dim], rows.last)
    if given["step"] != 1 or not same(rows.blocks, 1) or not reaches_the_end(node) or not long_enough:
        return None
    return Call(None, (Need(given["self"], rows),))


def cat(node: Node, rows: Rows) -> Call | None:
    """Other dimensions pass; along the joined one the last rows are the last operand's."""
    given = arguments(node)
    tensors, dim = given["tensors"], positive(given["dim"], len(shape(node)))
    if rows.dim != dim:
        whole = [t for t in tensors if len(shape(t)) == len(shape(node))]  # torch lets an empty [0] join anything
        return rewrite(node, tensors=[Need(t, rows) for t in whole])
    last = tensors[-1]
    if len(shape(last)) != len(shape(node)) or not same(rows.blocks, 1) or not at_least(shape(last)[dim], rows.last):
        return None
    if last.meta["val"].dtype != node.meta["val"].dtype:
        return None
    return Call(None, (Need(last, rows),))


def stack(node: Node, rows: Rows) -> Call | None:
    """A new dimension of the operands' number."""
    given = arguments(node)
    new = positive(given["dim"], len(shape(node)))
    if rows.dim == new:
        return None
    inner = rows.at(rows.dim - (rows.dim > new))
    return rewrite(node, tensors=[Need(t, inner) for t in given["tensors"]])


def pieces(node: Node, rows: Rows) -> Call | None:
    """split and chunk: each piece has the operand's rows, unless they are what is split."""
    operand = node.args[0]
    assert isinstance(operand, Node)
    cut = positive(arguments(node)["dim"], len(shape(operand)))
    return first_operand(node, rows) if rows.dim != cut else None


def unbind(node: Node, rows: Rows) -> Call | None:
    """The pieces lose the dimension."""
    return select(node, rows)


def getitem(node: Node, rows: Rows) -> Call | None:
    """One of several results; they are narrowed together."""
    source, index = node.args
    assert isinstance(source, Node)
    return Call(operator.getitem, (Need(source, rows), index))


def repeat(node: Node, rows: Rows) -> Call | None:
    """Dimensions repeated once pass."""
    given = arguments(node)
    new = len(given["repeats"]) - len(shape(given["self"]))
    if given["repeats"][rows.dim] != 1 or rows.dim < new:
        return None
    return first_operand(node, rows.at(rows.dim - new))


def pad(node: Node, rows: Rows) -> Call | None:
    """Dimensions that are not padded pass. `pad` lists pairs from the last dimension back."""
    pair = 2 * (len(shape(node)) - 1 - rows.dim)
    amounts = list(arguments(node)["pad"])
    if any(amount != 0 for amount in amounts[pair : pair + 2]):
        return None
    return first_operand(node, rows)


# ---------------------------------------------------------------- look-ups


def embedding(node: Node, rows: Rows) -> Call | None:
    """weight[indices]: rows of the indices; the table is whole."""
    indices = arguments(node)["indices"]
    return rewrite(node, indices=Need(indices, rows)) if rows.dim < len(shape(indices)) else None


MASKS = (torch.bool, torch.uint8)  # indices of these types choose where they are not 0


def index(node: Node, rows: Rows) -> Call | None:
    """x[..., i, j, ...] with neighbouring integer indices: theirs are narrowed, or x where the index is a plain `:`."""
    given = arguments(node)
    operand, indices = given["self"], list(given["indices"])
    used = [position for position, i in enumerate(indices) if i is not None]
    if used != list(range(used[0], used[-1] + 1)) or any(indices[p].meta["val"].dtype in MASKS for p in used):
        return None
    spread = max(len(shape(indices[p])) for p in used)
    first = used[0]
    if first <= rows.dim < first + spread:
        inner, sizes = rows.at(rows.dim - first), shape(node)[first : first + spread]
        try:
            return rewrite(node, indices=[i if i is None else broadcast(i, inner, sizes) for i in indices])
        except LookupError:
            return None
    dim = rows.dim if rows.dim < first else rows.dim - spread + len(used)
    return rewrite(node, self=Need(operand, rows.at(dim)))


def gather(node: Node, rows: Rows) -> Call | None:
    """out[i, j] = x[i, index[i, j]]: along `dim` only the index moves, elsewhere both."""
    given = arguments(node)
    operand, chosen = given["self"], given["index"]
    if rows.dim == positive(given["dim"], len(shape(node))):
        return rewrite(node, index=Need(chosen, rows))
    if not same(shape(operand)[rows.dim], shape(chosen)[rows.dim]):
        return None
    return rewrite(node, self=Need(operand, rows), index=Need(chosen, rows))


def index_select(node: Node, rows: Rows) -> Call | None:
    """Along `dim` the index is narrowed, elsewhere the operand."""
    given = arguments(node)
    if rows.dim == positive(given["dim"], len(shape(node))):
        return rewrite(node, index=Need(given["index"], rows.at(0))) if shape(given["index"]) else None
    return rewrite(node, self=Need(given["self"], rows))


def one_hot(node: Node, rows: Rows) -> Call | None:
    """A new last dimension. Without `num_classes` its size would be read off the narrowed entries."""
    known = arguments(node)["num_classes"] != -1
    return first_operand(node, rows) if known and rows.dim < len(shape(node)) - 1 else None


def view_as_real(node: Node, rows: Rows) -> Call | None:
    """A new last dimension of two."""
    return first_operand(node, rows) if rows.dim < len(shape(node)) - 1 else None


def _table() -> dict[Any, Rule]:
    groups: list[tuple[Rule, list[Any]]] = [
        (
            first_operand,
            [aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other, aten._to_copy.default,
             aten.type_as.default, aten.contiguous.default, aten.clone.default, aten.detach.default,
             aten.alias.default, aten.square.default, aten.zeros_like.default, aten.ones_like.default,
             aten.full_like.default, aten.empty_like.default, aten.nan_to_num.default, aten.bucketize.Tensor],
        ),
        (
            pointwise,  # elementwise in all but the tag
            [aten.multiply.Tensor, aten.divide.Tensor, aten.where.Scalar, aten.where.ScalarSelf, aten.where.ScalarOther,
             aten.masked_fill.Tensor, aten.__and__.Tensor, aten.__or__.Tensor, aten.polar.default,
             aten.expand_as.default, aten.log_sigmoid.default, aten.hardswish.default],
        ),
        (factory("size"), [aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format,
                           aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
                           aten.new_empty.default]),
        (
            reduction,
            [aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.amin.default, aten.var.correction,
             aten.std.correction, aten.norm.ScalarOpt_dim, aten.linalg_vector_norm.default, aten.logsumexp.default,
             aten.prod.dim_int, aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim, aten.any.dim,
             aten.all.dim],
        ),
        (along(), [aten.softmax.int, aten._softmax.default, aten.log_softmax.int, aten._log_softmax.default,
                   aten.cumsum.default, aten.cumprod.default, aten.sort.default, aten.sort.stable,
                   aten.argsort.default, aten.topk.default, aten.glu.default]),
        (along("dims"), [aten.flip.default]),
        (normalisation, [aten.layer_norm.default, aten.rms_norm.default, aten.native_layer_norm.default]),
        (linear, [aten.linear.default]),
        (matmul, [aten.matmul.default, aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default]),
        (einsum, [aten.einsum.default]),
        (attention, [aten.scaled_dot_product_attention.default]),
        (reshape, [aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints]),
        (expand, [aten.expand.default, aten.broadcast_to.default]),
        (permutation(_permute), [aten.permute.default]),
        (permutation(_transpose), [aten.transpose.int, aten.swapaxes.default]),
        (permutation(_reverse_last_two), [aten.t.default, aten.mT.default]),
        (unsqueeze, [aten.unsqueeze.default]),
        (squeeze, [aten.squeeze.dim]),
        (select, [aten.select.int]),
        (slice_, [aten.slice.Tensor]),
        (cat, [aten.cat.default]),
        (stack, [aten.stack.default]),
        (pieces, [aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default]),
        (unbind, [aten.unbind.int]),
        (getitem, [operator.getitem]),
        (repeat, [aten.repeat.default]),
        (pad, [aten.constant_pad_nd.default, aten.pad.default]),
        (embedding, [aten.embedding.default]),
        (index, [aten.index.Tensor]),
        (gather, [aten.gather.default]),
        (index_select, [aten.index_select.default]),
        (one_hot, [aten.one_hot.default]),
        (view_as_real, [aten.view_as_real.default]),
        (first_operand, [aten.view_as_complex.default]),
    ]  # fmt: skip
    return {op: rule for rule, ops in groups for op in ops}


RULES: dict[Any, Rule] = _table()
