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

`passes/shuffled.py` proves that by passing these marks forward from every sort. `collapse` replaces what could be
proved by one call of a `Region`, which the row rules then treat like any other op. `expand` writes a region out again,
on whatever rows its operands have by then. What cannot be proved stays as it is, on all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from ridgefill_compile.passes import layout_rules as layout
from ridgefill_compile.passes.calls import Call, Need, aten, shape
from ridgefill_compile.passes.demand import has_effect
from ridgefill_compile.passes.emit import Emitter, copy_module, fake_mode_of
from ridgefill_compile.passes.rows import Rows
from ridgefill_compile.passes.rules import rule_for
from ridgefill_compile.passes.shuffled import Proof, Prover, order_of


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
        operands: list[Any] = list(node.args)
        if rows.selected is not None and any(per and rows.selected.each % per for per in self.entries_per_row):
            return None
        args = [
            Need(operand, _for_entries(rows, per)) if per else operand
            for operand, per in zip(operands, self.entries_per_row, strict=True)
        ]
        return Call(self, tuple(args))


def _for_entries(rows: Rows, per: int) -> Rows:
    """Rows of an operand that has `per` entries each."""
    selected = rows.selected and replace(rows.selected, each=rows.selected.each // per)
    return Rows(0, rows.last // per, rows.blocks, selected)


# ---------------------------------------------------------------- finding


def collapse(module: GraphModule) -> GraphModule:
    """A copy whose proved regions are single calls; the module itself if there are none."""
    if not any(order_of(node) for node in module.graph.nodes):
        return module
    result = copy_module(module)
    for node in list(result.graph.nodes):
        order = order_of(node)
        if order is not None:
            for proof in Prover(order).proofs():
                _replace(result.graph, proof)
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


def _replace(graph: Graph, proof: Proof) -> None:
    old, region = proof.nodes[-1], _region(proof)
    with graph.inserting_before(old):
        new = graph.call_function(region, tuple(region.operands))
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)


def _region(proof: Proof) -> Region:
    """Nodes as steps that stand for themselves: the graph may drop the nodes."""
    numbers: dict[Node, Any] = {node: Value(number) for number, node in enumerate([*proof.operands, *proof.nodes])}
    steps = []
    for node in proof.nodes:
        args: Any = node.args
        if node.target is aten.arange.default:
            args = ()  # as many as there are entries
        elif rule_for(node) in (layout.reshape, layout.expand):
            args = (args[0], [-1, *(int(size) for size in shape(node)[1:])])
        args, kwargs = map_arg((args, node.kwargs), numbers.__getitem__)
        meta = {key: value for key, value in node.meta.items() if key not in ("val", "tensor_meta")}
        steps.append(Step(node.target, args, kwargs, meta))
    return Region(steps, list(proof.operands), list(proof.operands.values()), numbers[proof.order].number)


def map_values(argument: Any, values: list[Any]) -> Any:
    """A step's arguments with the values they stand for."""

    def value_of(part: Any) -> Any:
        return values[part.number] if isinstance(part, Value) else part

    return map_aggregate(argument, value_of)
