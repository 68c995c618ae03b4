"""What the values between a sort and its undoing are, entry by entry: the proof behind `passes/experts.py`."""

from __future__ import annotations

import enum
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ridgefill_compile.passes import layout_rules as layout
from ridgefill_compile.passes.arithmetic_rules import linear, matmul, normalisation, pointwise, reduction
from ridgefill_compile.passes.calls import Call, arguments, aten, first_operand, needs, shape
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
class Proof:
    """A result that is computed row by row.

    Attributes:
        nodes: what computes it, in order, the result last.
        operands: values from outside -> how many sorted entries one of its rows has; 0: it is needed whole.
        order: the permutation.
    """

    nodes: list[Node]
    operands: dict[Node, int]
    order: Node


def order_of(node: Node) -> Node | None:
    """The permutation that sorts M keys, if this node is one."""
    if node.target is operator.getitem and node.args[1] == 1:
        source = node.args[0]
        assert isinstance(source, Node)
        sorts = source.target in (aten.sort.default, aten.sort.stable)
        return node if sorts and len(shape(node)) == 1 else None
    return node if node.target is aten.argsort.default and len(shape(node)) == 1 else None


class Prover:
    """Passes marks forward from one sort.

    Attributes:
        order: the permutation, [M].
        marks: what is known of the values that depend on it.
        lost: values that depend on it, and of which nothing is known.
        aligned: values from outside that are read row by row -> entries per row.
    """

    def __init__(self, order: Node) -> None:
        self.order = order
        self.sort: Node = arguments_of(order)[0] if order.target is operator.getitem else order
        self.keys = self.sort.args[0]
        self.entries: IntLike = shape(order)[0]
        self.marks: dict[Node, Mark] = {order: Mark.ORDER}
        self.lost: set[Node] = {self.sort}
        self.aligned: dict[Node, int] = {}

    def proofs(self) -> list[Proof]:
        """Every result that could be proved, and what computes it."""
        if not isinstance(self.keys, Node) or len(shape(self.keys)) != 1 or not counts_from_0(self.keys):
            return []  # negative keys would be sorted first and not be counted
        self.aligned[self.keys] = 1
        found: list[Proof] = []
        node = self.sort.next
        while node.op != "root":
            mark = self.marks.get(node) or self._mark(node)
            if mark is None and any(n in self.marks or n in self.lost for n in node.all_input_nodes):
                self.lost.add(node)
            if mark is not None:
                self.marks[node] = mark
            if mark is Mark.ALIGNED:
                proof = self._proof(node)
                found += [proof] if proof is not None else []
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
            _, places, values = arguments_of(node)[:3]
            counting = isinstance(values, Node) and values.target is aten.arange.default and len(values.args) == 1
            if counting and len(places) == 1 and self._is(places[0], Mark.ORDER):
                return Mark.INVERSE if same(shape(values)[0], self.entries) else None
        return None

    def _look_up(self, node: Node) -> Mark | None:
        """x[p], x[p // k], table[e[p]], and y[inverse]."""
        given = arguments_of(node)
        if node.target is aten.index.Tensor and len(given[1]) == 1:
            source, place = given[0], given[1][0]
        elif node.target is aten.index_select.default and given[1] == 0:
            source, _, place = given
        else:
            return None
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
        values, weights, ends = (*arguments_of(node), node.kwargs.get("offs"))[:3]
        plain = weights not in self.marks and len(node.args) <= 3 and not set(node.kwargs) - {"offs"}
        runs = plain and self._is(ends, Mark.COUNTS) and self._cumulated(ends, weights)
        return Mark.SHUFFLED if runs and self._is(values, Mark.SHUFFLED) else None

    def _cumulated(self, ends: Node, weights: Node) -> bool:
        """Whether these are cumulated counts of the keys 0, 1, ... of which there are as many as groups of weights."""
        sums = 0
        while ends.target is not aten.histc.default:
            sums += ends.target is aten.cumsum.default
            ends = arguments_of(ends)[0]
        given = arguments(ends)
        bins, low, high = given["bins"], given["min"], given["max"]
        return sums == 1 and same(shape(weights)[0], bins) and bool(low == 0) and bool(high == bins - 1)

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
        values = (operand.meta.get("val") for operand in node.all_input_nodes)
        if not all(isinstance(value, torch.Tensor | list | tuple | torch.SymFloat) for value in values):
            return None  # a size: it would count the entries
        call = rule(node, Rows(0, 1))
        if call is None or call.target is None or not self._reads_own_entry(node, call):
            return None
        keys = self._is(node.args[0], Mark.KEYS) and node.target in (aten.to.dtype, aten._to_copy.default)
        return Mark.KEYS if keys else Mark.SHUFFLED

    def _reads_own_entry(self, node: Node, call: Call) -> bool:
        """Whether one entry of the result needs one of each shuffled operand, and no rows of anything else."""
        read = {need.node: need.rows for need in needs((call.args, tuple(call.kwargs.values())))}
        for operand in node.all_input_nodes:
            rows = read.get(operand)
            if operand not in self.marks and rows is not None:
                return False
            if operand in self.marks:
                own = rows is not None and rows.dim == 0 and rows.last == 1 and same(rows.blocks, 1)
                if not own or self.marks[operand] not in (Mark.SHUFFLED, Mark.KEYS):
                    return False
        return True

    def _proof(self, result: Node) -> Proof | None:
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
                by_row = node is self.sort or any(
                    self.marks.get(n) in (Mark.ORDER, Mark.OWNER) for n in node.all_input_nodes
                )
                per = self.aligned[operand] if by_row else 0
                if outside.setdefault(operand, per) != per or isinstance(operand.meta.get("val"), torch.SymInt):
                    return None
        return Proof(sorted(inside), outside, self.order)


COUNTED_FROM_0 = (aten.topk.default, aten.sort.default, aten.sort.stable, aten.max.dim, aten.min.dim)


MOVES = (first_operand, layout.reshape, layout.expand, layout.unsqueeze, layout.squeeze, layout.select, layout.slice_)


def counts_from_0(value: Any) -> bool:
    """Whether no entry of an integer value is negative: places that an op found, and what only moves them about."""
    if isinstance(value, int | float):
        return value >= 0
    if not isinstance(value, Node) or value.op != "call_function":
        return False
    given = arguments_of(value)
    if value.target is operator.getitem:
        return bool(given[1] == 1 and given[0].target in COUNTED_FROM_0)
    if value.target in (aten.argmax.default, aten.argmin.default, aten.argsort.default):
        return True
    rule = rule_for(value)
    if rule in MOVES:
        return counts_from_0(given[0])
    if rule in (layout.cat, layout.stack):
        return all(counts_from_0(x) for x in given[0])
    if value.target in (aten.masked_fill.Scalar, aten.where.self, aten.where.ScalarOther):
        return all(counts_from_0(x) for x in given if not is_mask(x))
    return False


def is_mask(value: Any) -> bool:
    """Whether a value says yes or no."""
    return isinstance(value, Node) and bool(value.meta["val"].dtype == torch.bool)


def arguments_of(node: Node) -> tuple[Any, ...]:
    """A call's positional arguments, of whatever types."""
    return node.args
