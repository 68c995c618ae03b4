"""Which columns of a product each entry of a later value is made of. Changes nothing.

    y = linear(x, W)         [B, N, 6]        columns 0 1 2 3 4 5 of dim 2
    y.view(B, N, 2, 3)       [B, N, 2, 3]     (0 1 2), (3 4 5) of dims 2 and 3
    ....transpose(1, 2)      [B, 2, N, 3]     the same of dims 1 and 3
    ...[..., 0]              [B, 2, N]        0, 3 of dim 1

Followed are ops that work on each column alone, and ops that move entries: of these, the columns' numbers are moved the
same way. Whatever else reads such a value is its reader. A value made of two that are followed is not followed itself.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ridgefill_compile.passes.arithmetic_rules import pointwise
from ridgefill_compile.passes.calls import arguments, aten, positive, shape
from ridgefill_compile.passes.demand import has_effect
from ridgefill_compile.passes.layout_rules import ORDERS, product
from ridgefill_compile.passes.rows import same
from ridgefill_compile.passes.rules import rule_for

WEIGHTS: dict[Any, tuple[tuple[str, int], ...]] = {  # of each product, the operands that have its columns, and where
    aten.linear.default: (("weight", 0), ("bias", 0)),
    aten.addmm.default: (("mat2", 1), ("self", -1)),
    aten.mm.default: (("mat2", 1),),
    aten.matmul.default: (("other", 1),),
}
VIEWS = (
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unflatten.int, aten.flatten.using_ints,
)  # fmt: skip
SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)


@dataclass(frozen=True)
class Columns:
    """Whose column each entry of a value is, along its dimensions of columns; rows and batch are the others.

    Attributes:
        dims: dimensions of columns, ascending.
        ids: of their sizes: numbers of the product's columns.
        order: of the other dimensions, what number in memory order each had when the product, or a view, was made.
        direct: it and all it is made from have one dimension of columns, so it can be written for some columns alone.
    """

    dims: tuple[int, ...]
    ids: Tensor
    order: tuple[int, ...]
    direct: bool = True

    @property
    def rank(self) -> int:
        """Of the value."""
        return len(self.dims) + len(self.order)

    @property
    def trailing(self) -> bool:
        """Whether the other dimensions come first and are as they were made: so a view can be followed."""
        return self.order == tuple(range(len(self.order))) and self.dims[:1] in ((), (len(self.order),))

    def by_memory(self) -> list[int]:
        """The other dimensions, in memory order."""
        return [dim for _, dim in sorted(zip(self.order, self.others(), strict=True))]

    def others(self) -> list[int]:
        """The other dimensions, in the value's order."""
        return [dim for dim in range(self.rank) if dim not in self.dims]

    def permuted(self, order: Sequence[int]) -> Columns:
        """Of a permuted value: dimension i comes from `order[i]`."""
        others = dict(zip(self.others(), self.order, strict=True))
        moved = [self.dims.index(source) for source in order if source in self.dims]
        dims = tuple(dim for dim, source in enumerate(order) if source in self.dims)
        left = tuple(others[source] for source in order if source in others)
        return Columns(dims, self.ids.permute(moved), left, self.direct)

    def numbers(self) -> list[int]:
        """Numbers of the product's columns, entry by entry."""
        found: list[int] = self.ids.flatten().tolist()
        return found


@dataclass
class Fused:
    """A product or join, and what is made of its columns.

    Attributes:
        source: the product.
        columns: of the source and of every value that has its columns; what a value is made from comes first.
        made_from: each of these values but the source -> the one it is made from.
        readers: of these, those that others read -> those others.
    """

    source: Node
    columns: dict[Node, Columns]
    made_from: dict[Node, Node]
    readers: dict[Node, list[Node]] = field(default_factory=dict)


def width_of(node: Node) -> int | None:
    """How many columns a product or join gives, if it is one that can be taken apart."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
        return None
    width = shape(node)[-1] if shape(node) else 0
    if node.target in WEIGHTS:
        given = arguments(node)
        own = [(given[name], dim) for name, dim in WEIGHTS[node.target] if given[name] is not None]
        plain = isinstance(width, int) and all(_has(operand, dim, width) for operand, dim in own)
        return width if plain and len(shape(own[0][0])) == 2 else None  # type: ignore[return-value]
    if node.target is aten.cat.default:
        given = arguments(node)
        last = positive(given["dim"], len(shape(node))) == len(shape(node)) - 1
        parts = [shape(part) for part in given["tensors"]]
        plain = last and all(len(part) == len(shape(node)) and isinstance(part[-1], int) for part in parts)
        plain = plain and all(part.meta["val"].dtype == node.meta["val"].dtype for part in given["tensors"])
        return width if plain else None  # type: ignore[return-value]
    return None


def _has(operand: Node, dim: int, width: object) -> bool:
    """Whether an operand has as many entries along a dimension, counted from 0 or from the end."""
    sizes = shape(operand)
    return -len(sizes) <= dim < len(sizes) and same(sizes[dim], width)  # type: ignore[arg-type]


def follow(source: Node, width: int) -> Fused:
    """All values that are made of a product's columns, each column for itself."""
    rank = len(shape(source))
    start = Columns((rank - 1,), torch.arange(width, device="cpu"), tuple(range(rank - 1)))
    fused = Fused(source, {source: start}, {})
    ahead = [source]
    while ahead:
        value = ahead.pop()
        for reader, result in _results(value):
            columns = _through(reader, result, value, fused.columns[value])
            twice = sum(operand in fused.columns for operand in reader.all_input_nodes) > 1
            if columns is None or twice or result in fused.columns:
                fused.readers.setdefault(value, []).append(reader)
            else:
                fused.columns[result], fused.made_from[result] = columns, value
                ahead.append(result)
    _leave_out_meetings(fused)
    return fused


def _leave_out_meetings(fused: Fused) -> None:
    """A value made of two that have columns is none: which it was reached from is chance."""
    for value in list(fused.made_from):
        if value not in fused.made_from:
            continue
        reader = value.args[0] if value.target is operator.getitem else value
        assert isinstance(reader, Node)
        met = [operand for operand in reader.all_input_nodes if operand in fused.columns]
        if len(met) > 1:
            for each in _made_of(fused, value):
                fused.columns.pop(each)
                fused.made_from.pop(each)
                fused.readers.pop(each, None)
            for operand in met:
                if operand in fused.columns:
                    readers = fused.readers.setdefault(operand, [])
                    readers += [reader] if reader not in readers else []


def _made_of(fused: Fused, value: Node) -> list[Node]:
    found = [value]
    for each in found:
        found += [result for result, source in fused.made_from.items() if source is each]
    return found


def _results(value: Node) -> Iterator[tuple[Node, Node]]:
    """Readers of a value, with what each gives: several results are taken one by one."""
    for reader in value.users:
        pieces = reader.target in SPLITS or reader.target is aten.unbind.int
        if pieces and all(user.target is operator.getitem for user in reader.users):
            for result in reader.users:
                yield reader, result
        else:
            yield reader, reader


# ---------------------------------------------------------------- following columns


def _through(reader: Node, result: Node, value: Node, columns: Columns) -> Columns | None:
    """The columns of what an op makes of a value; None: it mixes them, or they cannot be followed."""
    if reader.op != "call_function" or has_effect(reader) or not isinstance(result.meta.get("val"), Tensor):
        return None
    if reader is not result:
        return _piece(reader, result, columns)
    if reader.args[:1] != (value,) and reader.target is not aten.cat.default and rule_for(reader) is not pointwise:
        return None
    if reader.target in ORDERS:
        return columns.permuted(ORDERS[reader.target](reader, columns.rank))
    if reader.target is aten.slice.Tensor:
        return _slice(reader, columns)
    if reader.target is aten.select.int:
        return _select(columns, **{name: arguments(reader)[name] for name in ("dim", "index")})
    if reader.target is aten.index.Tensor:
        return _look_up(reader, columns)
    if reader.target in VIEWS:
        return _view(reader, value, columns)
    return columns if columns.direct and _column_by_column(reader, value, columns.dims[0]) else None


def _slice(reader: Node, columns: Columns) -> Columns | None:
    given = arguments(reader)
    dim = positive(given["dim"], columns.rank)
    if dim not in columns.dims:
        return columns if columns.direct else None
    if any(isinstance(given[name], Node) for name in ("start", "end")):
        return None
    at = slice(given["start"], given["end"], given["step"])
    kept = [slice(None)] * len(columns.dims)
    kept[columns.dims.index(dim)] = at
    return replace(columns, ids=columns.ids[tuple(kept)])


def _select(columns: Columns, dim: int, index: Any) -> Columns | None:
    dim = positive(dim, columns.rank)
    if dim not in columns.dims or len(columns.dims) == 1 or not isinstance(index, int):
        return None
    dims = tuple(each - (each > dim) for each in columns.dims if each != dim)
    return Columns(dims, columns.ids.select(columns.dims.index(dim), index), columns.order, direct=False)


def _look_up(reader: Node, columns: Columns) -> Columns | None:
    """Entries of one dimension of columns, at places that are written into the model's code."""
    indices = arguments(reader)["indices"]
    used = [dim for dim, index in enumerate(indices) if index is not None]
    if len(used) != 1 or used[0] not in columns.dims:
        return None
    places = _constant(indices[used[0]])
    if places is None or places.dim() != 1 or places.dtype != torch.int64:
        return None
    along = columns.dims.index(used[0])
    kept = columns.ids.index_select(along, places % columns.ids.shape[along])
    return replace(columns, ids=kept, direct=False)


def _constant(node: Node) -> Tensor | None:
    """The value of a constant of the graph."""
    while node.target in (aten.lift_fresh_copy.default, aten.lift_fresh.default):
        node = node.args[0]  # type: ignore[assignment]
    held = getattr(node.graph.owning_module, str(node.target), None) if node.op == "get_attr" else None
    return held.cpu() if isinstance(held, Tensor) else None


def _piece(reader: Node, result: Node, columns: Columns) -> Columns | None:
    """One of several results: a piece along a dimension of columns."""
    number = result.args[1]
    dim = positive(arguments(reader)["dim"], columns.rank)
    if dim not in columns.dims or not isinstance(number, int):
        return None
    if reader.target is aten.unbind.int:
        return _select(columns, dim, number)
    lengths = [piece.shape[dim] for piece in reader.meta["val"]]
    start = sum(lengths[:number])
    kept = columns.ids.narrow(columns.dims.index(dim), start, lengths[number])
    return replace(columns, ids=kept)


def _view(reader: Node, value: Node, columns: Columns) -> Columns | None:
    """Columns behind all else, before and after: the last dimensions that hold as many entries."""
    if not columns.trailing:
        return None
    sizes, number = shape(reader), columns.ids.numel()
    first = len(sizes)
    while first > 0 and isinstance(sizes[first - 1], int) and product(sizes[first:]) != number:
        first -= 1
    if product(sizes[first:]) != number or first == len(sizes):
        return None
    before = shape(value)[: len(columns.order)]
    if not same(product(before), product(sizes[:first])):
        return None
    dims, ids = tuple(range(first, len(sizes))), columns.ids.reshape(sizes[first:])
    return Columns(dims, ids, tuple(range(first)), columns.direct and len(dims) == 1)


def _column_by_column(reader: Node, value: Node, dim: int) -> bool:
    """Whether a call works on each entry of a dimension alone, and gives a value of the same layout."""
    if len(shape(reader)) != len(shape(value)) or not same(shape(reader)[dim], shape(value)[dim]):
        return False
    given = arguments(reader) if isinstance(reader.target, torch._ops.OpOverload) else {}
    if reader.target is aten.conv1d.default:
        channels = shape(value)[dim]
        apart = given["groups"] == channels and same(shape(given["weight"])[0], channels)
        return bool(dim == 1 and len(shape(value)) == 3 and apart and reader.args[0] is value)
    if reader.target in (aten.constant_pad_nd.default, aten.pad.default):
        sides = given["pad"][2 * (len(shape(value)) - 1 - dim) :][:2]
        return given.get("mode", "constant") == "constant" and all(side == 0 for side in sides)
    if reader.target is aten.cat.default:
        return positive(given["dim"], len(shape(value))) != dim
    rule = rule_for(reader)
    if rule is pointwise:
        return all(each is value or _is_setting(each, reader, dim) for each in reader.all_input_nodes)
    return reader.target in (aten._to_copy.default, aten.clone.default, aten.contiguous.default, aten.to.dtype)


def _is_setting(operand: Node, reader: Node, dim: int) -> bool:
    """Whether an operand of a pointwise op is one number a column, or the same for all columns: a bias, or a mask of
    rows. Behind a sum of two whole values, the residual stream's, no parts are looked for.
    """
    own = aligned(operand, reader, dim)
    rest = [size for at, size in enumerate(operand.meta["val"].shape) if at != own] if own is not None else []
    return own == -1 or (own is not None and all(same(size, 1) for size in rest))


def aligned(operand: Node, reader: Node, dim: int) -> int | None:
    """Where an operand of a broadcasting op has the result's dimension: there, or -1 for nowhere; None: unknown."""
    if not isinstance(operand.meta.get("val"), Tensor):
        return None
    own = dim - (len(shape(reader)) - len(shape(operand)))
    if own < 0 or same(shape(operand)[own], 1):
        return -1
    return own if same(shape(operand)[own], shape(reader)[dim]) else None
