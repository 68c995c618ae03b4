"""Fused projections, taken apart where their columns are read on different rows.

Claim: the same values. One product gives queries, keys and values side by side; of filled rows only keys and values are
read. By rows alone the product could only be dropped whole or not at all:

    y = linear(x, W)                 [B, N, 3 d]        a = linear(x, W[:d])         [B, N, d]     read on the tail
    q, k, v = split(y, d)                               b = linear(x, W[d:])         [B, N, 2 d]   read on every row
                                                        q = a; k, v = split(b, d)

Between a product and its parts there may be whatever works on each column alone: pointwise ops, convolutions of one
channel each, padding and slices of rows. Such a chain is written once for the columns that are read on all rows, and
once for the others. The parts themselves may be cut out in any way that only moves entries (slices, views by heads,
transposes): whose column an entry is, is found by moving the columns' numbers the same way.

A join of several values along columns (`cat`) is taken apart like a product.

On entry: functional ATen with fake values. On exit: the same, with the same inputs and outputs; demand analysis and
elimination do the rest. Readers that want all columns of few rows (the state of a convolution, say) keep the fused
product, which is then computed on those rows.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ridgefill_compile.errors import CannotFill
from ridgefill_compile.passes.arithmetic_rules import pointwise
from ridgefill_compile.passes.calls import arguments, aten, positive, shape
from ridgefill_compile.passes.demand import Demands, analyse, has_effect, needed_of
from ridgefill_compile.passes.emit import Emitter, copy_module, fake_mode_of, inputs_of
from ridgefill_compile.passes.layout_rules import last_two_reversed, permuted, product, transposed
from ridgefill_compile.passes.rows import EVERYTHING, NOTHING, Demand, Rows, same
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
MOST_ROUNDS = 4
SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.tensor_split.sections)
ORDERS: dict[Any, Any] = {
    aten.transpose.int: transposed,
    aten.swapaxes.default: transposed,
    aten.permute.default: permuted,
    aten.t.default: last_two_reversed,
    aten.mT.default: last_two_reversed,
}


def unfuse(module: GraphModule) -> GraphModule:
    """A graph module with the same results, in which columns that are read on fewer rows have products of their own.

    In rounds: once a join is taken apart, the products that it joins may have parts that are read on fewer rows.
    """
    for _ in range(MOST_ROUNDS):
        found = _apart(_worth_it(module.graph, analyse(module.graph)))
        if not found:
            break
        module = copy_module(module)
        names = {node.name: node for node in module.graph.nodes}
        for fused in found:
            _Writer(module, _in(names, fused)).write()
        module.graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output") or has_effect(n))
        module.recompile()
    return module


def _apart(found: Iterable[_Fused]) -> list[_Fused]:
    """Of these, those of which none reads another's values: writing one would change what is known of the other."""
    chosen: list[_Fused] = []
    made: set[Node] = set()
    read: set[Node] = set()
    for fused in found:
        values, readers = set(fused.columns), {reader for each in fused.readers.values() for reader in each}
        if made.isdisjoint(values | readers) and read.isdisjoint(values):
            chosen.append(fused)
        made |= values
        read |= readers
    return chosen


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

    def list(self) -> list[int]:
        """Numbers of the product's columns, entry by entry."""
        found: list[int] = self.ids.flatten().tolist()
        return found


@dataclass
class _Fused:
    """A product or join, and what is made of its columns.

    Attributes:
        source: the product.
        columns: of the source and of every value that has its columns.
        made_from: each of these values but the source -> the one it is made from.
        readers: of these, those that others read -> those others.
        parts: of these, the largest that have columns of one group alone -> its number.
        groups: columns read on every row, and the others; each part's are neighbours.
    """

    source: Node
    columns: dict[Node, Columns]
    made_from: dict[Node, Node]
    readers: dict[Node, list[Node]] = field(default_factory=dict)
    parts: dict[Node, int] = field(default_factory=dict)
    groups: list[list[int]] = field(default_factory=list)


def _worth_it(graph: Graph, demands: Demands) -> Iterator[_Fused]:
    """Fused products that run on every row, with parts that need not; the last ones first."""
    for node in reversed(graph.nodes):
        if demands.on(node) is not EVERYTHING:
            continue
        width = _width(node)
        if width is None:
            continue
        fused = _follow(node, width)
        if all(columns.ids.numel() == width for columns in fused.columns.values()):
            continue  # it has no parts
        if not any(demands.on(value) not in (EVERYTHING, NOTHING) for value in fused.readers):
            continue
        whole: set[int] = set()
        fewer: set[int] = set()
        for value, readers in fused.readers.items():
            needed = [_needed_of_source(fused, value, needed_of(value, r, demands.on(r))) for r in readers]
            (whole if EVERYTHING in needed else fewer).update(fused.columns[value].list())
        if whole and fewer - whole:
            _group(fused, whole, fewer - whole)
            yield fused


def _group(fused: _Fused, *groups: set[int]) -> None:
    """Find the parts that have columns of one group alone, the largest ones, and put each one's side by side."""
    inside: set[Node] = set()
    for value, columns in fused.columns.items():  # what a value is made from comes first
        number = next((n for n, group in enumerate(groups) if group.issuperset(columns.list())), None)
        if fused.made_from.get(value) in inside:
            inside.add(value)
        elif number is not None and columns.ids.numel():
            fused.parts[value] = number
            inside.add(value)
    for number in range(len(groups)):
        lists = sorted(fused.columns[part].list() for part, group in fused.parts.items() if group == number)
        fused.groups.append(list(dict.fromkeys(column for each in lists for column in each)))


def _width(node: Node) -> int | None:
    """How many columns a product or join gives, if it is one that can be taken apart."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
        return None
    width = shape(node)[-1] if shape(node) else 0
    if node.target in WEIGHTS:
        given = arguments(node)
        own = [(given[name], dim) for name, dim in WEIGHTS[node.target] if given[name] is not None]
        plain = isinstance(width, int) and all(same(shape(operand)[dim], width) for operand, dim in own)
        return width if plain and len(shape(own[0][0])) == 2 else None  # type: ignore[return-value]
    if node.target is aten.cat.default:
        given = arguments(node)
        last = positive(given["dim"], len(shape(node))) == len(shape(node)) - 1
        parts = [shape(part) for part in given["tensors"]]
        plain = last and all(len(part) == len(shape(node)) and isinstance(part[-1], int) for part in parts)
        return width if plain else None  # type: ignore[return-value]
    return None


def _follow(source: Node, width: int) -> _Fused:
    """All values that are made of a product's columns, each column for itself."""
    rank = len(shape(source))
    start = Columns((rank - 1,), torch.arange(width, device="cpu"), tuple(range(rank - 1)))
    fused = _Fused(source, {source: start}, {})
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


def _leave_out_meetings(fused: _Fused) -> None:
    """A value made of two that have columns is none: which it was reached from is chance."""
    for value in list(fused.made_from):
        if value not in fused.made_from:
            continue
        reader = value.args[0] if value.target is operator.getitem else value
        met = [operand for operand in reader.all_input_nodes if operand in fused.columns]  # type: ignore[union-attr]
        if len(met) > 1:
            for each in _made_of(fused, value):
                fused.columns.pop(each)
                fused.made_from.pop(each)
                fused.readers.pop(each, None)
            for operand in met:
                if operand in fused.columns:
                    readers = fused.readers.setdefault(operand, [])
                    readers += [reader] if reader not in readers else []


def _made_of(fused: _Fused, value: Node) -> list[Node]:
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


def _needed_of_source(fused: _Fused, value: Node, demand: Demand) -> Demand:
    """Which rows of the product some rows of a value are made from, by the way of its columns alone."""
    while value is not fused.source:
        above = fused.made_from[value]
        if value.target is operator.getitem:
            pieces = value.args[0]
            assert isinstance(pieces, Node)
            value, demand = pieces, needed_of(pieces, value, demand)
        value, demand = above, needed_of(above, value, demand)
    if isinstance(demand, Rows) and demand.dim in fused.columns[value].dims:
        return EVERYTHING  # some columns, of every row
    return demand


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
    dims, ids = tuple(range(first, len(sizes))), columns.ids.reshape(sizes[first:])  # type: ignore[arg-type]
    return Columns(dims, ids, tuple(range(first)), columns.direct and len(dims) == 1)


def _column_by_column(reader: Node, value: Node, dim: int) -> bool:
    """Whether a call works on each entry of a dimension alone, and gives a value of the same layout."""
    if not same(shape(reader)[dim], shape(value)[dim]) or len(shape(reader)) != len(shape(value)):
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
        return all(_aligned(operand, reader, dim) is not None for operand in reader.all_input_nodes)
    return reader.target in (aten._to_copy.default, aten.clone.default, aten.contiguous.default, aten.to.dtype)


def _aligned(operand: Node, reader: Node, dim: int) -> int | None:
    """Where an operand of a broadcasting op has the result's dimension: there, or -1 for nowhere; None: unknown."""
    if not isinstance(operand.meta.get("val"), Tensor):
        return None
    own = dim - (len(shape(reader)) - len(shape(operand)))
    if own < 0 or same(shape(operand)[own], 1):
        return -1
    return own if same(shape(operand)[own], shape(reader)[dim]) else None


# ---------------------------------------------------------------- writing


class _Writer:
    """Writes each part anew, from products with the columns of its group alone."""

    def __init__(self, module: GraphModule, fused: _Fused) -> None:
        self.module = module
        self.fused = fused
        self.emit = Emitter(module.graph, fake_mode_of(module.graph))
        for node in inputs_of(module.graph):
            self.emit.know(node)
        self.written: dict[tuple[Node, int], tuple[Node, list[int]]] = {}

    def write(self) -> None:
        """Make every part that is in one group of that group's product."""
        for part, group in self.fused.parts.items():
            users = list(part.users)
            new = self.part(part, group)
            for user in users:
                user.replace_input_with(part, new)

    def part(self, part: Node, group: int) -> Node:
        """The same value as a part, made of its group's product."""
        base = part
        while not self.fused.columns[base].direct:
            base = self.fused.made_from[base]
        value, held = self.value(base, group)
        columns, found = self.fused.columns[part], self.fused.columns[base]
        with self.module.graph.inserting_before(part.next):
            value = self.take(value, found.dims[0], held, columns.list())
            return value if base is part else self.laid_out(value, found, part)

    def laid_out(self, value: Node, found: Columns, part: Node) -> Node:
        """Rows in memory order, columns last; then in the part's own shape and order."""
        columns = self.fused.columns[part]
        order = [*found.by_memory(), *found.dims]
        if order != sorted(order):
            value = self.emit(aten.permute.default, value, order, like=part)
        sizes = self.sizes([shape(part)[dim] for dim in columns.by_memory()])
        value = self.emit(aten.reshape.default, value, [*sizes, *columns.ids.shape], like=part)
        places = [*columns.by_memory(), *columns.dims]
        back = [places.index(dim) for dim in range(columns.rank)]
        return self.emit(aten.permute.default, value, back, like=part) if back != sorted(back) else value

    def sizes(self, sizes: Sequence[Any]) -> list[Any]:
        """Sizes as arguments; one that no input shows is left to be inferred."""
        first = next(node for node in self.module.graph.nodes if node.op != "placeholder")
        found: list[Any] = []
        with self.module.graph.inserting_before(first):
            for size in sizes:
                try:
                    found.append(self.emit.size(size))
                except CannotFill:
                    if -1 in found:
                        raise
                    found.append(-1)
        return found

    def value(self, node: Node, group: int) -> tuple[Node, list[int]]:
        """A value with a group's columns alone, and which these are, in order."""
        if (node, group) not in self.written:
            self.written[node, group] = self._value(node, group)
        return self.written[node, group]

    def _value(self, node: Node, group: int) -> tuple[Node, list[int]]:
        graph, chosen = self.module.graph, self.fused.groups[group]
        if node is self.fused.source:
            with graph.inserting_before(node.next):
                return self.source(chosen), chosen
        columns, above = self.fused.columns[node], self.fused.made_from[node]
        value, held = self.value(above, group)
        before = self.fused.columns[above]
        own = set(columns.list())
        wanted = [column for column in held if column in own]
        with graph.inserting_before(node.next):
            if node.target is operator.getitem or _cuts(node, before):
                return self.take(value, before.dims[0], held, wanted), wanted
            if node.target in VIEWS:
                sizes = self.sizes(shape(node)[:-1])
                return self.emit(aten.reshape.default, value, [*sizes, len(wanted)], like=node), wanted
            at = {column: place for place, column in enumerate(before.list())}
            return self.call(node, above, value, [at[column] for column in wanted]), wanted

    def call(self, node: Node, above: Node, value: Node, places: list[int]) -> Node:
        """The node's own call on some entries of its dimension of columns."""
        dim = self.fused.columns[above].dims[0]
        size = self.fused.columns[above].ids.numel()
        every = list(range(size))

        def of(operand: Any) -> Any:
            if operand is above:
                return value
            if not isinstance(operand, Node) or not isinstance(operand.meta.get("val"), Tensor):
                return operand
            own = dim if node.target is aten.cat.default else _aligned(operand, node, dim)
            return operand if own in (None, -1) else self.take(operand, own, every, places)

        if node.target is aten.conv1d.default:
            given = arguments(node)
            filters = [given[name] and self.take(given[name], 0, every, places) for name in ("weight", "bias")]
            settings = [given[name] for name in ("stride", "padding", "dilation")]
            return self.emit(node.target, value, *filters, *settings, len(places), like=node)
        args = torch.fx.node.map_aggregate(node.args, of)
        kwargs = {name: of(operand) for name, operand in node.kwargs.items()}
        return self.emit(node.target, *args, like=node, **kwargs)

    def source(self, columns: list[int]) -> Node:
        """The product, or the join, of some columns."""
        node, every = self.fused.source, list(range(self.fused.columns[self.fused.source].ids.numel()))
        if node.target is aten.cat.default:
            return self.joined(columns)
        changed = dict(arguments(node))
        for name, dim in WEIGHTS[node.target]:
            if changed[name] is not None:
                at = positive(dim, len(shape(changed[name])))
                changed[name] = self.take(changed[name], at, every, columns)
        args = [changed.pop(a.name) for a in node.target._schema.arguments if not a.kwarg_only]  # type: ignore[union-attr]
        kwargs = {name: changed[name] for name in node.kwargs if name in changed}
        return self.emit(node.target, *args, like=node, **kwargs)

    def joined(self, columns: list[int]) -> Node:
        """Some columns of a join: of each operand, those that are wanted."""
        node, parts, start = self.fused.source, [], 0
        dim = len(shape(node)) - 1
        owner: list[tuple[Node, int]] = []
        for operand in arguments(node)["tensors"]:
            width = shape(operand)[-1]
            owner += [(operand, place) for place in range(width)]  # type: ignore[arg-type]
        while start < len(columns):
            operand = owner[columns[start]][0]
            end = start
            while end < len(columns) and owner[columns[end]][0] is operand:
                end += 1
            every = list(range(shape(operand)[-1]))  # type: ignore[arg-type]
            parts.append(self.take(operand, dim, every, [owner[column][1] for column in columns[start:end]]))
            start = end
        return parts[0] if len(parts) == 1 else self.emit(aten.cat.default, parts, dim, like=node)

    def take(self, value: Node, dim: int, held: list[int], wanted: list[int]) -> Node:
        """Some entries of a dimension, in a given order: all, a slice, or looked up."""
        if held == wanted:
            return value
        at = {entry: place for place, entry in enumerate(held)}
        places = [at[entry] for entry in wanted]
        first = places[0]
        if places == list(range(first, first + len(places))):
            return self.emit(aten.slice.Tensor, value, dim, first, first + len(places), like=value)
        index = self.constant(torch.tensor(places, device=value.meta["val"].device))
        return self.emit(aten.index.Tensor, value, [*[None] * dim, index], like=value)

    def constant(self, tensor: Tensor) -> Node:
        """A tensor as a value of the graph."""
        name = next(n for i in range(10**6) if not hasattr(self.module, n := f"_columns{i}"))
        self.module.register_buffer(name, tensor)
        node = self.module.graph.get_attr(name)
        node.meta["val"] = self.emit.mode.from_tensor(tensor, static_shapes=True)
        return node


def _cuts(node: Node, before: Columns) -> bool:
    """Whether a slice is one of columns."""
    return node.target is aten.slice.Tensor and positive(arguments(node)["dim"], before.rank) in before.dims


def _in(names: dict[str, Node], fused: _Fused) -> _Fused:
    """The same of a copy of the graph."""
    return _Fused(
        names[fused.source.name],
        {names[node.name]: columns for node, columns in fused.columns.items()},
        {names[node.name]: names[source.name] for node, source in fused.made_from.items()},
        {names[value.name]: [names[r.name] for r in readers] for value, readers in fused.readers.items()},
        {names[part.name]: group for part, group in fused.parts.items()},
        fused.groups,
    )
