"""Row rules of layout: reshapes, slices, joins and look-ups move entries and compute nothing."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from ridgefill_compile.passes.calls import (
    TO_THE_END,
    Call,
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
from ridgefill_compile.passes.rows import BLOCKS, IntLike, Rows, at_least, plain, same
from ridgefill_compile.recurrences.table import RECURRENCES

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
        [N, k, d]     -> [N * k, d]     last k * T of dim 0 -> last T of dim 0
    """
    length = result[rows.dim] // rows.blocks
    outer = product(result[: rows.dim]) * rows.blocks
    for dim in range(len(source)):
        before = product(source[:dim])
        if same(before, outer) and same(source[dim], length):
            return _selecting(rows, Rows(dim, rows.last), result, source)
        blocks = outer if same(before, 1) else outer // before
        if not same(before * blocks, outer):
            continue
        last = scaled(rows.last, source[dim], blocks * length)
        if last is not None and same(source[dim] // blocks * blocks, source[dim]):
            return _selecting(rows, Rows(dim, last, blocks), result, source)
    return None


def _selecting(rows: Rows, found: Rows, result: Sequence[IntLike], source: Sequence[IntLike]) -> Rows | None:
    """Rows of a reshaped value's source, with those that were selected of the value.

    Positions count from the start of a sequence; so all that lies before the rows must be the sequences.
    """
    if rows.selected is None:
        return found
    each = scaled(rows.selected.each, found.last, rows.last) if found.last != rows.last else rows.selected.each
    if each is None:
        return None
    selected = replace(rows.selected, each=each)
    if selected.batch is None:
        outer = product(source[: found.dim]) * found.blocks
        return replace(found, selected=selected) if same(outer, 1) or same(found.blocks, 1) else None
    sequences = rows.blocks if selected.batch == BLOCKS else result[selected.batch]  # type: ignore[index]
    before = product(result[: rows.dim if selected.batch == BLOCKS else selected.batch])  # type: ignore[index]
    if same(found.blocks, 1):
        places = [dim for dim in range(found.dim) if not same(source[dim], 1)]
        at = [dim for dim in places if same(source[dim], sequences)]
        alone = [dim for dim in at if same(product(source[:dim]), before)]
        return replace(found, selected=replace(selected, batch=alone[0])) if alone else None
    if not same(found.blocks, sequences) or not same(product(source[: found.dim]), 1) or not same(before, 1):
        return None
    return replace(found, selected=replace(selected, batch=BLOCKS))


def scaled(last: int, size: IntLike, other: IntLike) -> int | None:
    """How many of `size` entries `last` of `other` equally long ones are: their ratio, if that comes out even."""
    if same(size, other):
        return last
    for factor in (size // other, other // size):
        ratio = plain(factor)
        if ratio is not None and ratio > 1:
            if same(size, other * ratio):
                return last * ratio
            if same(other, size * ratio) and last % ratio == 0:
                return last // ratio
    return None


def reshape(node: Node, rows: Rows) -> Call | None:
    """view, reshape, flatten, squeeze, ...: found by memory order; the narrowed size is left to be inferred.

    A view becomes a reshape: the last rows of a value, cut out of the whole, are no longer contiguous.
    """
    operand = node.args[0]
    assert isinstance(operand, Node)
    source = same_rows_in(rows, shape(node), shape(operand))
    if source is None:
        return None
    given = arguments(node)
    name = next((n for n in ("size", "shape") if n in given), None)
    sizes: list[Any] = list(given[name] if name is not None else shape(node))
    sizes = [known if is_inferred(size) else size for size, known in zip(sizes, shape(node), strict=True)]
    unknown = [dim for dim, size in enumerate(sizes) if isinstance(size, torch.SymInt) and dim != rows.dim]
    if len(unknown) > 1 or (unknown and count(rows) is None):
        return None  # only one size can be inferred
    sizes[rows.dim] = -1
    if unknown:
        sizes[unknown[0]], sizes[rows.dim] = -1, count(rows)
    return Call(aten.reshape.default, (Need(operand, source), sizes))


def is_inferred(size: Any) -> bool:
    """Whether a size is given as -1."""
    return isinstance(size, int) and size == -1


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


def permuted(node: Node, rank: int) -> list[int]:
    """Order of `permute`: where each dimension of the result comes from."""
    return [positive(dim, rank) for dim in arguments(node)["dims"]]


def transposed(node: Node, rank: int) -> list[int]:
    """Order of `transpose`: two dimensions change places."""
    order = list(range(rank))
    a, b = (positive(dim, rank) for dim in list(arguments(node).values())[1:])
    order[a], order[b] = order[b], order[a]
    return order


def last_two_reversed(node: Node, rank: int) -> list[int]:
    """Order of `t` and `mT`: the last two dimensions change places."""
    return [*range(rank - 2), rank - 1, rank - 2] if rank > 1 else [0]


ORDERS: dict[Any, Callable[[Node, int], list[int]]] = {
    aten.permute.default: permuted,
    aten.transpose.int: transposed,
    aten.swapaxes.default: transposed,
    aten.swapdims.default: transposed,
    aten.t.default: last_two_reversed,
    aten.mT.default: last_two_reversed,
}


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
    """Other dimensions pass; the last rows of `x[a:]` are the last rows of x, those of `x[:-c]` lie c further up."""
    given = arguments(node)
    operand, dim = given["self"], positive(given["dim"], len(shape(node)))
    if rows.dim != dim:
        return first_operand(node, rows)
    if given["step"] != 1 or not same(rows.blocks, 1) or not at_least(shape(node)[dim], rows.last):
        return None
    if rows.selected is not None:
        return None
    if reaches_the_end(node):
        return Call(None, (Need(operand, rows),))
    size, end = shape(operand)[dim], given["end"].meta["val"] if isinstance(given["end"], Node) else given["end"]
    left_out = plain(-end if isinstance(end, int) and end < 0 else size - end)
    if left_out is None or left_out < 1 or not at_least(size, rows.last + left_out):
        return None
    need = Need(operand, Rows(dim, rows.last + left_out))
    return Call(aten.slice.Tensor, (need, dim, 0, rows.last))


def slice_scatter(node: Node, rows: Rows) -> Call | None:
    """A slice along one dimension is replaced; the others pass, and so do rows behind it."""
    given = arguments(node)
    if rows.dim == positive(given["dim"], len(shape(node))):
        end = given["end"]
        return _behind(node, rows, end) if isinstance(end, int) and end >= 0 else None
    return rewrite(node, self=Need(given["self"], rows), src=Need(given["src"], rows))


def select_scatter(node: Node, rows: Rows) -> Call | None:
    """One entry of one dimension is replaced; the others pass, and so do rows behind it."""
    given = arguments(node)
    gone = positive(given["dim"], len(shape(node)))
    if rows.dim == gone:
        index = given["index"]
        return _behind(node, rows, index + 1) if isinstance(index, int) and index >= 0 else None
    inner = rows.at(rows.dim - (rows.dim > gone))
    return rewrite(node, self=Need(given["self"], rows), src=Need(given["src"], inner))


def _behind(node: Node, rows: Rows, end: int) -> Call | None:
    """The last rows, if nothing from `end` on is written."""
    if not same(rows.blocks, 1) or rows.selected is not None or not at_least(shape(node)[rows.dim], rows.last + end):
        return None
    return Call(None, (Need(arguments(node)["self"], rows),))


def scatter(node: Node, rows: Rows) -> Call | None:
    """out[index[i, j], j] = src[i, j]: other dimensions than `dim` pass, where all operands have them whole."""
    given = arguments(node)
    names = [name for name in ("self", "index", "src") if isinstance(given.get(name), Node)]
    if rows.dim == positive(given["dim"], len(shape(node))):
        return None
    if not all(same(shape(given[name])[rows.dim], shape(node)[rows.dim]) for name in names):
        return None
    return rewrite(node, **{name: Need(given[name], rows) for name in names})


def unfold(node: Node, rows: Rows) -> Call | None:
    """Windows along one dimension, in a new last one: the last of them, a step of 1 apart, cover `size - 1` entries
    more than they are. Other dimensions pass.
    """
    given = arguments(node)
    operand, cut = given["self"], positive(given["dimension"], len(shape(node)) - 1)
    if rows.dim == len(shape(node)) - 1:
        return None
    if rows.dim != cut:
        return first_operand(node, rows)
    plainly = given["step"] == 1 and rows.selected is None and same(rows.blocks, 1)
    last = rows.last + given["size"] - 1
    if not (plainly and at_least(shape(operand)[cut], last)):
        return None
    return rewrite(node, self=Need(operand, Rows(cut, last)))


def cat(node: Node, rows: Rows) -> Call | None:
    """Other dimensions pass; along the joined one the last rows are the last operand's."""
    given = arguments(node)
    tensors, dim = given["tensors"], positive(given["dim"], len(shape(node)))
    if rows.dim != dim:
        whole = [t for t in tensors if len(shape(t)) == len(shape(node))]  # torch lets an empty [0] join anything
        return rewrite(node, tensors=[Need(t, rows) for t in whole])
    last = tensors[-1]
    if rows.selected is not None:
        return None
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
    if source.target in RECURRENCES and index != 0:
        return None  # a scan's state has no rows
    return Call(operator.getitem, (Need(source, rows), index))


def repeat(node: Node, rows: Rows) -> Call | None:
    """Dimensions repeated once pass; of one repeated r times, rows in r times as many blocks are those of each copy."""
    given = arguments(node)
    operand, times = given["self"], given["repeats"][rows.dim]
    dim = rows.dim - (len(given["repeats"]) - len(shape(operand)))
    if dim < 0 or not isinstance(times, int):
        return None
    if times == 1:
        return first_operand(node, rows.at(dim))
    if rows.selected is not None:
        return None
    blocks = rows.blocks // times if times > 0 else 0
    if times < 1 or not same(blocks * times, rows.blocks):
        return None
    return first_operand(node, Rows(dim, rows.last, blocks))


def pad(node: Node, rows: Rows) -> Call | None:
    """Dimensions that are not padded pass; what is added in front goes. `pad` lists pairs from the last dimension, and
    negative amounts cut off.
    """
    given = arguments(node)
    operand, pair = given["self"], 2 * (len(shape(node)) - 1 - rows.dim)
    amounts = list(given["pad"])
    before, after = (*amounts[pair : pair + 2], 0, 0)[:2]
    if before == 0 and after == 0:
        return first_operand(node, rows)
    plainly = isinstance(before, int) and isinstance(after, int) and before >= 0
    constant = given.get("mode", "constant") == "constant" and rows.selected is None
    inner = rows.last - after if plainly else 0
    if not (constant and inner > 0 and same(rows.blocks, 1) and at_least(shape(operand)[rows.dim], inner)):
        return None
    amounts[pair] = 0
    return rewrite(node, self=Need(operand, Rows(rows.dim, inner)), pad=amounts)


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


def one_hot(node: Node, rows: Rows) -> Call | None:
    """A new last dimension. Without `num_classes` its size would be read off the narrowed entries."""
    known = arguments(node)["num_classes"] != -1
    return first_operand(node, rows) if known and rows.dim < len(shape(node)) - 1 else None


def view_as_real(node: Node, rows: Rows) -> Call | None:
    """A new last dimension of two."""
    return first_operand(node, rows) if rows.dim < len(shape(node)) - 1 else None
