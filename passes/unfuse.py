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
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from ridgefill_compile.errors import CannotFill
from ridgefill_compile.passes.calls import arguments, aten, positive, rewrite, shape
from ridgefill_compile.passes.columns import VIEWS, WEIGHTS, Columns, Fused, aligned, follow, width_of
from ridgefill_compile.passes.demand import Demands, analyse, has_effect, needed_of
from ridgefill_compile.passes.eliminate import keep_apart
from ridgefill_compile.passes.emit import Emitter, copy_module, fake_mode_of, inputs_of
from ridgefill_compile.passes.functionalize import is_view
from ridgefill_compile.passes.rows import EVERYTHING, NOTHING, Demand, Rows

MOST_ROUNDS = 8
BY_STRIDES = (aten.as_strided.default, aten.view_as_complex.default, aten.view.dtype)


def unfuse(module: GraphModule) -> GraphModule:
    """A graph module with the same results, in which columns that are read on fewer rows have products of their own.

    In rounds: once a join is taken apart, the products that it joins may have parts that are read on fewer rows.
    """
    original, refused = module.graph, set[str]()
    for _ in range(MOST_ROUNDS):
        found = _apart(_worth_it(module.graph, analyse(module.graph), refused))
        if not found:
            break
        written = copy_module(module)
        names = {node.name: node for node in written.graph.nodes}
        emit = Emitter(written.graph, fake_mode_of(written.graph))
        for planned in found:
            try:
                _Writer(written, _in(names, planned)).write()
            except CannotFill:  # a size that no input shows
                refused.add(planned.fused.source.name)
                break
        else:
            keep_apart(original, emit)
            written.graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output") or has_effect(n))
            written.recompile()
            module = written
    return module


def _apart(found: Iterable[_Plan]) -> list[_Plan]:
    """Of these, those of which none reads another's values: writing one would change what is known of the other."""
    chosen: list[_Plan] = []
    made: set[Node] = set()
    read: set[Node] = set()
    for planned in found:
        fused = planned.fused
        values, readers = set(fused.columns), {reader for each in fused.readers.values() for reader in each}
        if made.isdisjoint(values | readers) and read.isdisjoint(values):
            chosen.append(planned)
            made |= values
            read |= readers
    return chosen


@dataclass
class _Plan:
    """How a product is taken apart.

    Attributes:
        fused: the product.
        parts: of its values, the largest that have columns of one group alone -> its number.
        groups: columns read on every row, and the others; each part's are neighbours.
    """

    fused: Fused
    parts: dict[Node, int]
    groups: list[list[int]]


def _worth_it(graph: Graph, demands: Demands, refused: set[str]) -> Iterator[_Plan]:
    """Fused products that run on every row, with parts that need not; the last ones first."""
    for node in reversed(graph.nodes):
        if demands.on(node) is not EVERYTHING:
            continue
        width = width_of(node)
        if width is None or node.name in refused:
            continue
        fused = follow(node, width)
        if all(columns.ids.numel() == width for columns in fused.columns.values()):
            continue  # it has no parts
        if not any(demands.on(value) not in (EVERYTHING, NOTHING) for value in fused.columns):
            continue
        whole: set[int] = set()
        fewer: set[int] = set()
        for value, readers in fused.readers.items():
            needed = [_needed_of_source(fused, value, needed_of(value, r, demands.on(r))) for r in readers]
            (whole if EVERYTHING in needed else fewer).update(fused.columns[value].numbers())
        if whole and fewer - whole and not any(map(_read_by_strides, fused.columns)):
            yield _group(fused, whole, fewer - whole)


def _group(fused: Fused, *groups: set[int]) -> _Plan:
    """Find the parts that have columns of one group alone, the largest ones, and put each one's side by side."""
    parts: dict[Node, int] = {}
    inside: set[Node] = set()
    for value, columns in fused.columns.items():
        number = next((n for n, group in enumerate(groups) if group.issuperset(columns.numbers())), None)
        if fused.made_from.get(value) in inside:
            inside.add(value)
        elif number is not None and columns.ids.numel():
            parts[value] = number
            inside.add(value)
    ordered = []
    for number in range(len(groups)):
        lists = sorted(fused.columns[part].numbers() for part, group in parts.items() if group == number)
        ordered.append(list(dict.fromkeys(column for each in lists for column in each)))
    return _Plan(fused, parts, ordered)


def _read_by_strides(value: Node) -> bool:
    """Whether a reader of a value, or of a view of it, asks how it lies in memory: a part may lie otherwise."""
    return any(user.target in BY_STRIDES or (is_view(user) and _read_by_strides(user)) for user in value.users)


def _needed_of_source(fused: Fused, value: Node, demand: Demand) -> Demand:
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


class _Writer:
    """Writes each part anew, from products with the columns of its group alone."""

    def __init__(self, module: GraphModule, planned: _Plan) -> None:
        self.module = module
        self.fused, self.parts, self.groups = planned.fused, planned.parts, planned.groups
        self.emit = Emitter(module.graph, fake_mode_of(module.graph))
        for node in inputs_of(module.graph):
            self.emit.know(node)
        self.written: dict[tuple[Node, int], tuple[Node, list[int]]] = {}

    def write(self) -> None:
        """Make every part that is in one group of that group's product."""
        named: set[Node] = set()
        for part, group in self.parts.items():
            users = list(part.users)
            new = self.part(part, group)
            for user in users:
                user.replace_input_with(part, new)
            self.lies_otherwise(users)
            if new not in named:  # whoever knows a part by name, as a state, say, finds it
                named.add(new)
                part.name, new.name = new.name, part.name

    def lies_otherwise(self, readers: list[Node]) -> None:
        """Tell readers, and who reads their views, how a part lies in memory now."""
        for reader in readers:
            if reader.op != "call_function":
                continue
            if reader.target is aten.view.default:
                reader.target = aten.reshape.default  # of a part that is cut out of more columns
            before, reader.meta["val"] = reader.meta["val"], self.emit.value_of(reader)
            if is_view(reader) or _strides(before) != _strides(reader.meta["val"]):
                self.lies_otherwise(list(reader.users))

    def part(self, part: Node, group: int) -> Node:
        """The same value as a part, made of its group's product."""
        base, behind = part, part.next
        while not self.fused.columns[base].direct:
            base = self.fused.made_from[base]
        value, held = self.value(base, group)
        columns, found = self.fused.columns[part], self.fused.columns[base]
        with self.module.graph.inserting_before(behind):
            value = self.take(value, found.dims[0], held, columns.numbers())
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
        graph, chosen = self.module.graph, self.groups[group]
        if node is self.fused.source:
            with graph.inserting_before(node.next):
                return self.source(chosen), chosen
        columns, above = self.fused.columns[node], self.fused.made_from[node]
        value, held = self.value(above, group)
        before = self.fused.columns[above]
        own = set(columns.numbers())
        wanted = [column for column in held if column in own]
        with graph.inserting_before(node.next):
            if node.target is operator.getitem or _cuts(node, before):
                return self.take(value, before.dims[0], held, wanted), wanted
            if node.target in VIEWS:
                sizes = self.sizes(shape(node)[:-1])
                return self.emit(aten.reshape.default, value, [*sizes, len(wanted)], like=node), wanted
            at = {column: place for place, column in enumerate(before.numbers())}
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
            if len(shape(operand)) != len(shape(node)) and node.target is aten.cat.default:
                return operand  # without entries
            own = dim if node.target is aten.cat.default else aligned(operand, node, dim)
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
        given, taken = arguments(node), {}
        for name, dim in WEIGHTS[node.target]:
            if given[name] is not None:
                taken[name] = self.take(given[name], positive(dim, len(shape(given[name]))), every, columns)
        call = rewrite(node, **taken)
        return self.emit(call.target, *call.args, like=node, **call.kwargs)

    def joined(self, columns: list[int]) -> Node:
        """Some columns of a join: of each operand, those that are wanted."""
        node, dim = self.fused.source, len(shape(self.fused.source)) - 1
        operands = arguments(node)["tensors"]
        places = [(number, place) for number, each in enumerate(operands) for place in range(shape(each)[dim])]
        parts = []
        for number, run in groupby((places[column] for column in columns), key=lambda at: at[0]):
            every = list(range(shape(operands[number])[dim]))
            parts.append(self.take(operands[number], dim, every, [place for _, place in run]))
        return self.emit(aten.cat.default, parts, dim, like=node)  # a copy even of one, as the join was

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
        name = next(n for i in range(10**6) if not hasattr(self.module, n := f"ridgefill_columns{i}"))
        self.module.register_buffer(name, tensor)
        node = self.module.graph.get_attr(name)
        node.meta["val"] = self.emit.mode.from_tensor(tensor, static_shapes=True)
        return node


def _strides(value: Any) -> list[Any]:
    return [tensor.stride() for tensor in tree_leaves(value) if isinstance(tensor, Tensor)]


def _cuts(node: Node, before: Columns) -> bool:
    """Whether a slice is one of columns."""
    return node.target is aten.slice.Tensor and positive(arguments(node)["dim"], before.rank) in before.dims


def _in(names: dict[str, Node], planned: _Plan) -> _Plan:
    """The same of a copy of the graph, as far as writing needs it."""
    fused = planned.fused
    columns = {names[node.name]: columns for node, columns in fused.columns.items()}
    made_from = {names[node.name]: names[source.name] for node, source in fused.made_from.items()}
    parts = {names[part.name]: group for part, group in planned.parts.items()}
    return _Plan(Fused(names[fused.source.name], columns, made_from), parts, planned.groups)
