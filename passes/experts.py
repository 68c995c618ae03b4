"""Mixtures of experts, proved row by row: sort, gather, grouped matrix product, scatter back, as one call.

    e  [M]        expert of each entry (M = rows * experts per row)
    p = argsort(e);  x[p // k] [M, d]            entries in order of their expert
    y = grouped_mm(x[p // k], weights, ends)     expert i takes the entries between ends[i - 1] and ends[i]
    y[inverse of p]                              entries back in the order of the rows

None of these ops commutes with taking some rows: which place an entry is sorted to depends on every other entry. The
region as a whole does, and here is why. Say a value is *shuffled by p* if its entry j is some function of row `p[j]`
alone. Then `x[p]` is; so is what entrywise ops make of it; so is the grouped product, if its ends are the cumulated
counts of the sorted keys, for then entry j meets exactly the weights of expert `e[p[j]]`. Read at the inverse of p,
entry i is a function of row i alone. So the region may be run on fewer rows from the start, sort included.

`collapse` proves that by passing these marks forward from every sort, and replaces what it could prove by one call of
a `Region`, which the row rules then treat like any other op. `expand` writes a region out again, on whatever rows its
operands have by then. What cannot be proved stays as it is, on all rows.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from ridgefill_compile.passes import layout_rules as layout
from ridgefill_compile.passes.arithmetic_rules import linear, matmul, normalisation, pointwise, reduction
from ridgefill_compile.passes.calls import Call, Need, aten, first_operand, shape
from ridgefill_compile.passes.demand import has_effect
from ridgefill_compile.passes.emit import Emitter, copy_module, fake_mode_of
from ridgefill_compile.passes.rows import IntLike, Rows, same
from ridgefill_compile.passes.rules import rule_for


class Mark(enum.Enum):
    """What a value between a sort and its undoing is, entry by entry of dimension 0."""

    ORDER = "p: the entry that was sorted to place j"
    OWNER = "p // k: the row of the entry at place j"
    KEYS = "e[p]: the sorted keys"
    SHUFFLED = "a function of row p[j] (or p[j] // k) alone"
    COUNTS = "how often each key occurs, or that cumulated"
    BLANK = "space for M entries, not yet written"
    INVERSE = "the inverse of p"
    ALIGNED = "a function of row i alone: the region's result"


ENTRYWISE = (
    pointwise, first_operand, linear, matmul, normalisation, reduction,
    layout.pieces, layout.getitem, layout.unsqueeze, layout.squeeze, layout.unbind, layout.select, layout.slice_,
    layout.cat, layout.stack, layout.reshape, layout.expand,
)  # fmt: skip
"""Rules whose op, asked for rows of dimension 0, treats entry j like every other: what they say of the last row holds
of each. Slices and joins *along* dimension 0 give themselves away by computing nothing."""

GROUPED_PRODUCTS = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")


@dataclass(frozen=True)
class Value:
    """A value of a region, by number: its operands first, then what its steps give."""

    number: int


@dataclass(frozen=True)
class Step:
    """One call of a region. It stands apart from the graph it was found in."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    like: Any  # the meta of the node


@dataclass(eq=False)
class Region:
    """A proved region: a call of `operands`, each aligned with the result's rows or needed whole.

    Attributes:
        steps: what it computes, in order; the last is the result.
        operands: values from outside.
        entries_per_row: for each operand, how many of the M sorted entries one of its rows has; 0: needed whole.
        order: the permutation's number.
    """

    steps: list[Step]
    operands: list[Node]
    entries_per_row: list[int]
    order: int

    def __post_init__(self) -> None:
        self.__name__ = "row_by_row"  # FX writes it into the module's code

    def __call__(self, *values: Any) -> Any:
        """The result of real (or fake) values."""
        return self.replay(
            values, lambda step, args, kwargs: step.target(*args, **kwargs), lambda value: value.shape[0]
        )

    def write(self, emit: Emitter, operands: Sequence[Any]) -> Node:
        """The region's own calls, as nodes at the insert point."""

        def call(step: Step, args: Any, kwargs: Any) -> Node:
            node = emit(step.target, *args, **kwargs)
            node.meta = {**step.like, "val": node.meta["val"]}
            return node

        def length(value: Node) -> Any:
            size = shape(value)[0]
            return size if isinstance(size, int) else emit(aten.sym_size.int, value, 0)

        result: Node = self.replay(operands, call, length)
        return result

    def alone(self, node: Node) -> Graph:
        """A graph of nothing but a call of the region, written out."""
        graph = Graph()
        operands = []
        for operand in node.args:
            assert isinstance(operand, Node)
            operands.append(graph.placeholder(operand.name))
            operands[-1].meta = dict(operand.meta)
        self.write(Emitter(graph, fake_mode_of(graph)), operands)
        return graph

    def replay(self, operands: Sequence[Any], call: Callable[..., Any], length: Callable[[Any], Any]) -> Any:
        """Compute the region with `call(step, args, kwargs)`, on as many rows as the operands have."""
        values = list(operands)
        for step in self.steps:
            args, kwargs = map_values((step.args, step.kwargs), values)
            if step.target is aten.arange.default:
                args = (length(values[self.order]),)
            values.append(call(step, args, kwargs))
        return values[-1]

    def rule(self, node: Node, rows: Rows) -> Call | None:
        """Row rule of a call of the region: see `passes/rules.py`."""
        entries = rows.last
        if rows.dim != 0 or any(per and entries % per for per in self.entries_per_row):
            return None
        args = [
            Need(operand, Rows(0, entries // per, rows.blocks)) if per else operand
            for operand, per in zip(node.args, self.entries_per_row, strict=True)
        ]
        return Call(self, tuple(args))


# ---------------------------------------------------------------- finding


def collapse(module: GraphModule) -> GraphModule:
    """A copy whose proved regions are single calls; the module itself if there are none."""
    if not any(_order_of(node) for node in module.graph.nodes):
        return module
    result = copy_module(module)
    for node in list(result.graph.nodes):
        order = _order_of(node)
        if order is not None:
            for old, region in _Prover(order).regions():
                _replace(result.graph, old, region)
    result.graph.eliminate_dead_code(_stays)
    result.recompile()
    return result


def _stays(node: Node) -> bool:
    return node.op in ("placeholder", "output") or has_effect(node)


def expand(module: GraphModule) -> GraphModule:
    """A copy with every region written out again; the module itself if there are none."""
    if not any(isinstance(node.target, Region) for node in module.graph.nodes):
        return module
    result = copy_module(module)
    emit = Emitter(result.graph, fake_mode_of(result.graph))
    for node in list(result.graph.nodes):
        if isinstance(node.target, Region):
            with result.graph.inserting_before(node):
                written = node.target.write(emit, node.args)
            node.replace_all_uses_with(written)
            result.graph.erase_node(node)
    result.recompile()
    return result


def _order_of(node: Node) -> Node | None:
    """The permutation that sorts M keys, if this node is one."""
    if node.target is operator.getitem and node.args[1] == 1:
        source = node.args[0]
        assert isinstance(source, Node)
        sorts = source.target in (aten.sort.default, aten.sort.stable)
        return node if sorts and len(shape(node)) == 1 else None
    return node if node.target is aten.argsort.default and len(shape(node)) == 1 else None


def _replace(graph: Graph, old: Node, region: Region) -> None:
    with graph.inserting_before(old):
        new = graph.call_function(region, tuple(region.operands))
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)


class _Prover:
    """Passes marks forward from one sort.

    Attributes:
        order: the permutation, [M].
        marks: what is known of the values that depend on it.
        lost: values that depend on it, and of which nothing is known.
        aligned: values from outside that are read row by row -> entries per row.
    """

    def __init__(self, order: Node) -> None:
        self.order = order
        self.sort = order.args[0] if order.target is operator.getitem else order
        assert isinstance(self.sort, Node)
        self.keys = self.sort.args[0]
        self.entries: IntLike = shape(order)[0]
        self.marks: dict[Node, Mark] = {order: Mark.ORDER}
        self.lost: set[Node] = {self.sort}
        self.aligned: dict[Node, int] = {}

    def regions(self) -> list[tuple[Node, Region]]:
        """Every result that could be proved, and what computes it."""
        if not isinstance(self.keys, Node) or len(shape(self.keys)) != 1 or not counts_from_0(self.keys):
            return []  # negative keys would be sorted first and not be counted
        self.aligned[self.keys] = 1
        found: list[tuple[Node, Region]] = []
        node = self.sort.next
        while node.op != "root":
            mark = self.marks.get(node) or self._mark(node)
            if mark is None and any(n in self.marks or n in self.lost for n in node.all_input_nodes):
                self.lost.add(node)
            if mark is not None:
                self.marks[node] = mark
            if mark is Mark.ALIGNED:
                region = self._region(node)
                found += [(node, region)] if region is not None else []
            node = node.next
        return found

    def _mark(self, node: Node) -> Mark | None:
        if node.op != "call_function":
            return None
        if node.target is operator.getitem and node.args == (self.sort, 0):
            return Mark.KEYS
        marked = [operand for operand in node.all_input_nodes if operand in self.marks]
        if not marked or any(operand in self.lost for operand in node.all_input_nodes):
            return None
        for proof in (self._order, self._look_up, self._counts, self._product, self._entrywise):
            mark = proof(node)
            if mark is not None:
                return mark
        return None

    def _is(self, value: Any, mark: Mark) -> bool:
        return isinstance(value, Node) and self.marks.get(value) is mark

    def _order(self, node: Node) -> Mark | None:
        """Places and their owners, and the way back."""
        first = node.args[0] if node.args else None
        if self._is(first, Mark.ORDER):
            if node.target in (aten.empty_like.default, aten.zeros_like.default):
                return Mark.BLANK
            if node.target is aten.argsort.default:
                return Mark.INVERSE
            floored = node.target is aten.floor_divide.default or node.kwargs.get("rounding_mode") == "floor"
            if floored and isinstance(node.args[1], int):
                return Mark.OWNER
        if node.target is aten.index_put.default and self._is(first, Mark.BLANK):
            _, places, values = node.args[:3]
            counting = isinstance(values, Node) and values.target is aten.arange.default and len(values.args) == 1
            if (
                counting
                and len(places) == 1
                and self._is(places[0], Mark.ORDER)
                and same(shape(values)[0], self.entries)
            ):  # type: ignore[arg-type]
                return Mark.INVERSE
        return None

    def _look_up(self, node: Node) -> Mark | None:
        """x[p], x[p // k], table[e[p]], and y[inverse]."""
        if node.target is aten.index.Tensor and len(node.args[1]) == 1:  # type: ignore[arg-type]
            source, place = node.args[0], node.args[1][0]  # type: ignore[index]
        elif node.target is aten.index_select.default and node.args[1] == 0:
            source, _, place = node.args
        else:
            return None
        assert isinstance(source, Node)
        if self._is(place, Mark.INVERSE):
            return Mark.ALIGNED if self.marks.get(source) in (Mark.SHUFFLED, Mark.KEYS) else None
        if source in self.marks:
            return None
        if self._is(place, Mark.KEYS):
            return Mark.SHUFFLED
        if self._is(place, Mark.ORDER) and same(shape(source)[0], self.entries):
            return self._row_by_row(source, 1)
        if self._is(place, Mark.OWNER):
            per = place.args[1]
            return self._row_by_row(source, per) if same(shape(source)[0] * per, self.entries) else None
        return None

    def _row_by_row(self, source: Node, per: int) -> Mark | None:
        if self.aligned.setdefault(source, per) != per:
            return None
        return Mark.SHUFFLED

    def _counts(self, node: Node) -> Mark | None:
        """How often each key occurs does not depend on their order; nor do sums of that."""
        first = node.args[0] if node.args else None
        if node.target is aten.histc.default and self._is(first, Mark.KEYS):
            return Mark.COUNTS
        if node.target in (aten.cumsum.default, aten.to.dtype, aten._to_copy.default) and self._is(first, Mark.COUNTS):
            return Mark.COUNTS
        return None

    def _product(self, node: Node) -> Mark | None:
        """Groups that end at the cumulated counts are the runs of equal keys: entry j meets the weights of its key."""
        if str(node.target) not in GROUPED_PRODUCTS:
            return None
        values, weights, ends = (
            node.args[0],
            node.args[1],
            node.args[2] if len(node.args) > 2 else node.kwargs.get("offs"),
        )
        runs = self._is(ends, Mark.COUNTS) and self._cumulated(ends, weights)  # type: ignore[arg-type]
        plain = weights not in self.marks and len(node.args) <= 3 and not set(node.kwargs) - {"offs"}
        return Mark.SHUFFLED if runs and plain and self._is(values, Mark.SHUFFLED) else None

    def _cumulated(self, ends: Node, weights: Node) -> bool:
        """Whether these are cumulated counts of the keys 0, 1, ... of which there are as many as groups of weights."""
        sums = 0
        while ends.target is not aten.histc.default:
            sums += ends.target is aten.cumsum.default
            ends = ends.args[0]  # type: ignore[assignment]
        bins, low, high = ends.args[1:4]
        return sums == 1 and same(shape(weights)[0], bins) and low == 0 and high == bins - 1  # type: ignore[arg-type, operator]

    def _entrywise(self, node: Node) -> Mark | None:
        """By the row rule of the op: entry j of the result reads entry j of shuffled operands, and no other rows."""
        rule = rule_for(node)
        ours = getattr(rule, "__qualname__", "").startswith("along.")
        if rule is None or not (rule in ENTRYWISE or ours):
            return None
        value = node.meta["val"]
        first = value[0] if isinstance(value, list | tuple) else value
        if not isinstance(first, torch.Tensor) or not first.dim() or not same(first.shape[0], self.entries):
            return None
        if rule is layout.reshape and not all(isinstance(size, int) for size in first.shape[1:]):
            return None
        call = rule(node, Rows(0, 1))
        if (
            call is None
            or call.target is None
            or not all(
                isinstance(operand.meta.get("val"), torch.Tensor | list | tuple | torch.SymFloat)
                for operand in node.all_input_nodes
            )
        ):
            return None
        read: list[Any] = []
        map_needs((call.args, call.kwargs), read.append)
        entry = (Mark.SHUFFLED, Mark.KEYS)
        for operand in node.all_input_nodes:
            need = next((need for need in read if need.node is operand), None)
            if operand in self.marks:
                fits = need is not None and need.rows.dim == 0 and need.rows.last == 1 and same(need.rows.blocks, 1)
                if self.marks[operand] not in entry or not fits:
                    return None
            elif need is not None:
                return None  # rows of something that is not in this order
        keys = (
            rule is first_operand
            and self._is(node.args[0], Mark.KEYS)
            and node.target in (aten.to.dtype, aten._to_copy.default)
        )
        return Mark.KEYS if keys else Mark.SHUFFLED

    def _region(self, result: Node) -> Region | None:
        """What the result is computed from, cut off at values from outside."""
        inside: set[Node] = set()
        outside: dict[Node, int] = {}
        ahead = [result]
        while ahead:
            node = ahead.pop()
            if node in inside:
                continue
            inside.add(node)
            operands = node.all_input_nodes if node.target is not aten.arange.default else []
            for operand in operands:
                if operand in self.marks or operand is self.sort or operand.target is aten.arange.default:
                    ahead.append(operand)
                    continue
                place = node.args[1] if node.target is aten.index.Tensor else list(node.args[1:])
                by_row = node is self.sort or any(self.marks.get(n) in (Mark.ORDER, Mark.OWNER) for n in place)  # type: ignore[union-attr, arg-type]
                per = self.aligned[operand] if by_row else 0
                if outside.setdefault(operand, per) != per or isinstance(operand.meta.get("val"), torch.SymInt):
                    return None
        return _region(sorted(inside), outside, self.order)


def _region(nodes: list[Node], operands: dict[Node, int], order: Node) -> Region:
    """Nodes as steps that stand for themselves: the graph may drop the nodes."""
    numbers = {node: Value(number) for number, node in enumerate([*operands, *nodes])}
    steps = []
    for node in nodes:
        args: Any = node.args
        if node.target is aten.arange.default:
            args = ()  # as many as there are entries
        elif rule_for(node) is layout.reshape:
            args = (args[0], [-1, *(int(size) for size in shape(node)[1:])])
        args, kwargs = map_arg((args, node.kwargs), lambda n: numbers[n])
        meta = {key: value for key, value in node.meta.items() if key not in ("val", "tensor_meta")}
        steps.append(Step(node.target, args, kwargs, meta))
    return Region(steps, list(operands), list(operands.values()), numbers[order].number)


def map_values(argument: Any, values: list[Any]) -> Any:
    """A step's arguments with the values they stand for."""
    return map_aggregate(argument, lambda a: values[a.number] if isinstance(a, Value) else a)


COUNTED_FROM_0 = (aten.topk.default, aten.sort.default, aten.sort.stable, aten.max.dim, aten.min.dim)


MOVES = (first_operand, layout.reshape, layout.expand, layout.unsqueeze, layout.squeeze, layout.select, layout.slice_)


def counts_from_0(value: Any) -> bool:
    """Whether no entry of an integer value is negative: places that an op found, and what only moves them about."""
    if isinstance(value, int | float):
        return value >= 0
    if not isinstance(value, Node) or value.op != "call_function":
        return False
    if value.target is operator.getitem:
        return value.args[1] == 1 and value.args[0].target in COUNTED_FROM_0  # type: ignore[union-attr]
    if value.target in (aten.argmax.default, aten.argmin.default, aten.argsort.default):
        return True
    rule = rule_for(value)
    if rule in MOVES:
        return counts_from_0(value.args[0])
    if value.target in (aten.masked_fill.Scalar, aten.where.self, aten.where.ScalarOther):
        return all(
            counts_from_0(x) for x in value.args if not (isinstance(x, Node) and x.meta["val"].dtype == torch.bool)
        )
    return False


def map_needs(argument: Any, visit: Callable[[Need], None]) -> None:
    """Visit the narrowed operands in a call's arguments."""
    if isinstance(argument, Need):
        visit(argument)
    elif isinstance(argument, list | tuple):
        for item in argument:
            map_needs(item, visit)
    elif isinstance(argument, dict):
        map_needs(list(argument.values()), visit)
