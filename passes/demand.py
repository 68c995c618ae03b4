"""Dead rows, found: a backward analysis of which rows of every value somebody reads. Changes nothing.

Every output is read whole. Going backwards, each node's demand is put to its op's rule, which says what is needed of
the operands; a value's demand is the join of all its readers'. Where an op has no rule, or demands of two kinds meet,
the value is needed whole.

    y = linear(x); z = y[:, -1:]; return z      demands: z EVERYTHING, y last 1 of dim 1, x last 1 of dim 1
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from ridgefill_compile.passes.calls import Call, Need, arguments, aten, reads, rewrite, shape
from ridgefill_compile.passes.layout_rules import reaches_the_end
from ridgefill_compile.passes.rows import (
    EVERYTHING,
    NOTHING,
    Demand,
    Rows,
    Selected,
    at_least,
    at_most,
    covers,
    join,
    same,
)
from ridgefill_compile.passes.rules import narrowed_call
from ridgefill_compile.passes.selected_rows import take_rows
from ridgefill_compile.recurrences.table import RECURRENCES

SELECTION = "ridgefill_selection"  # meta key of a call of `take_rows`: how many last rows are read beside those


@dataclass
class Demands:
    """Result of `analyse`.

    Attributes:
        of: demand on each node that anyone reads; absent means NOTHING.
        calls: for each node whose demand is `Rows`, the narrowed call that computes just those.
        blocked: nodes of which only some rows are read, and which run whole all the same: their op has no rule.
    """

    of: dict[Node, Demand] = field(default_factory=dict)
    calls: dict[Node, Call] = field(default_factory=dict)
    blocked: list[Node] = field(default_factory=list)

    def on(self, node: Node) -> Demand:
        """Demand on a node."""
        return self.of.get(node, NOTHING)


def analyse(
    graph: Graph,
    roots: Iterable[tuple[Node, Demand]] | None = None,
    stop: Node | None = None,
    barrier: Container[Node] = (),
) -> Demands:
    """Demands of `roots`, or of all the graph's outputs and effects, on every node.

    Args:
        graph: is not changed.
        roots: nodes, and what is wanted of them.
        stop: go back no further than this node.
        barrier: nodes behind which nothing is demanded.
    """
    demands = Demands()
    wanted = roots if roots is not None else ((node, EVERYTHING) for node in effects(graph))
    for node, demand in wanted:
        demands.of[node] = join(demands.on(node), demand)
    for node in reversed(graph.nodes):
        demand = demands.on(node)
        if node is stop:
            break
        if demand is NOTHING or node in barrier:
            continue
        for operand, needed in _operands(node, demand, demands):
            demands.of[operand] = join(demands.on(operand), needed)
    return demands


def effects(graph: Graph) -> Iterator[Node]:
    """Nodes that count even if nobody reads their value: the output, writes into inputs, assertions."""
    for node in graph.nodes:
        if node.op == "output" or has_effect(node):
            yield node


def has_effect(node: Node) -> bool:
    """Whether a call writes into something or may raise. (FX's own test also counts whatever may draw random numbers,
    attention with its unused dropout among them.)
    """
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return node.op == "call_function" and node.target in torch.fx.node._side_effectful_functions
    return schema.is_mutable or node.target in torch.fx.node._side_effectful_functions or "_assert" in schema.name


def _operands(node: Node, demand: Demand, demands: Demands) -> Iterator[tuple[Node, Demand]]:
    """What the node needs of its operands; settles the node's own demand first."""
    if node.op not in ("call_function", "output"):
        demands.of[node] = EVERYTHING
        return
    if isinstance(demand, Rows):
        value = node.meta.get("val")
        call = None
        # What stands before the selection is not known to be read in part when it is computed.
        ahead = demand.selected is not None and node < demand.selected.index
        if demand.selected is not None:
            yield demand.selected.index, EVERYTHING
        if not ahead and not (isinstance(value, torch.Tensor) and covers(demand, value)):
            call = narrowed_call(node, demand)
            if call is None:
                demands.blocked.append(node)
        if call is not None:
            demands.calls[node] = call
            yield from _needs(call)
            return
        demands.of[node] = EVERYTHING
    suffix = whole_suffix(node)
    if suffix is not None:
        yield from _needs(suffix)
        return
    for operand in node.all_input_nodes:
        yield operand, EVERYTHING


def needed_of(operand: Node, node: Node, demand: Demand) -> Demand:
    """What a node, of which `demand` is wanted, needs of one of its operands."""
    needed: Demand = NOTHING
    if demand is not NOTHING:
        for each, rows in _operands(node, demand, Demands()):
            needed = join(needed, rows) if each is operand else needed
    return needed


def _needs(call: Call) -> Iterator[tuple[Node, Demand]]:
    return ((node, EVERYTHING if rows is None else rows) for node, rows in reads(call))


def whole_suffix(node: Node) -> Call | None:
    """`x[a:]`, read whole, reads only the last rows of x, if their number is a plain one or known to be at most that.

    `x[-k:]` with `1 <= k <= T` becomes `x[-T:][-k:]`: a `logits_to_keep` that changes from call to call is symbolic.
    A scan's state, read whole, needs no outputs of the scan: one row of them, since something must come out.
    """
    if node.target is operator.getitem:
        return _state_of_scan(node)
    if SELECTION in node.meta and node.target is take_rows:
        return _selection(node)
    if node.target not in (aten.slice.Tensor, aten.select.int):
        return None
    given = arguments(node)
    if node.target is aten.select.int:
        dim = given["dim"] % len(shape(given["self"]))
        return rewrite(node, self=Need(given["self"], Rows(dim, 1))) if given["index"] == -1 else None
    value = node.meta["val"]
    dim = given["dim"] % value.dim()
    length = value.shape[dim]
    last = at_most(length)
    if given["step"] != 1 or last is None or last == 0 or not reaches_the_end(node):
        return None
    need = Need(given["self"], Rows(dim, last))
    if isinstance(length, int):
        return Call(None, (need,))
    start = given["start"].meta["val"] if isinstance(given["start"], Node) else given["start"]
    if start is None or not at_least(-1, start) or not at_least(shape(given["self"])[dim], last):
        return None  # counted from the front, it would start elsewhere in the last rows
    return rewrite(node, self=need)


def _selection(node: Node) -> Call:
    """Selected rows, taken out of a value of which the last rows are read as well: the first ones of what is held."""
    value, index, dim, batch = node.args
    assert isinstance(value, Node) and isinstance(index, Node) and isinstance(dim, int)
    last = node.meta[SELECTION]
    selected = Selected(index, shape(index)[-1], batch)  # type: ignore[arg-type]
    return Call(aten.slice.Tensor, (Need(value, Rows(dim, last, 1, selected)), dim, 0, -last))


def _state_of_scan(node: Node) -> Call | None:
    scan, number = node.args
    assert isinstance(scan, Node)
    if not isinstance(scan.target, torch._ops.OpOverload) or scan.target not in RECURRENCES or number == 0:
        return None
    row_dim = RECURRENCES[scan.target].row_dim
    if same(scan.meta["val"][0].shape[row_dim], 0):
        return None  # it has none already
    return Call(operator.getitem, (Need(scan, Rows(row_dim, 1)), number))
