"""Where two graphs part: node by node, on the rows that are demanded of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves

from ridgefill_compile.passes.calls import aten
from ridgefill_compile.passes.demand import Demands, analyse
from ridgefill_compile.passes.rows import EVERYTHING, NOTHING, Demand, Rows
from ridgefill_compile.passes.verify import results_of
from ridgefill_compile.testing.square import UNSET, number, take
from ridgefill_compile.zoo.calling import worst

CLOSE = 1e-4  # relative to a value's largest entry; fp32 rounding of small models is up to 2e-5
SEEN_THROUGH = (aten.slice.Tensor, aten.cat.default)  # a rewrite may read the rows where these took them


class Mismatch(AssertionError):
    """What should be equal, and is not.

    Attributes:
        source: Python code that builds the same again and fails the same way.
        difference: the first node that differs, where one was found.
    """

    def __init__(self, what: str, source: str, difference: Difference | None = None) -> None:
        self.source, self.difference = source, difference
        where = f"\nfirst difference: {difference}" if difference else ""
        code = "".join(f"    {line}\n" if line else "\n" for line in source.splitlines())
        super().__init__(f"{what}{where}\n\nto see it again:\n\n{code}")


@dataclass(frozen=True)
class Difference:
    """The first node whose value is not what it was.

    Attributes:
        node: its name after the rewrite.
        stems_from: the name of the node before, whose value it should have.
        op: the call's target.
        layer: qualified name of the submodule it belongs to, where known.
        shape, shape_before: of its value, after and before.
        demanded: rows of it that somebody reads, in words.
        gap: the largest difference on these rows, relative to the value's largest entry; infinite for other shapes.
    """

    node: str
    stems_from: str
    op: str
    layer: str
    shape: tuple[int, ...]
    shape_before: tuple[int, ...]
    demanded: str
    gap: float

    def __str__(self) -> str:
        name = self.node if self.node == self.stems_from else f"{self.node} (before: {self.stems_from})"
        place = f" in {self.layer}" if self.layer else ""
        shapes = f"{list(self.shape)}, before {list(self.shape_before)}"
        gap = "another shape or type" if self.gap == float("inf") else f"off by {self.gap:.2g}"
        return f"node {name} = {self.op}{place} -> {shapes}; demanded: {self.demanded}; {gap}"


def first_difference(
    before: GraphModule,
    after: GraphModule,
    inputs: Sequence[Any],
    *,
    demanded: Mapping[int, Rows] | None = None,
    tolerance: float = CLOSE,
) -> Difference | None:
    """The first node of `after` that differs from the one of `before` that it stems from; None if the results agree.

    A node stems from the one that calls the same op on what its operands stem from. Of what stands between, and stems
    from nothing, there is no telling. A value may have all rows after a rewrite, or the last ones; those that somebody
    reads must be equal.

    Args:
        before: graph with (fake) values in `meta["val"]`, as `traced` leaves it.
        after: a rewrite of it, with the same inputs.
        inputs: of both.
        demanded: rows of results that are read, by their number; of the others all are.
        tolerance: largest difference that is none, relative to a value's largest entry.
    """
    old, new = values_of(before, inputs), values_of(after, inputs)
    pairs = list(zip(results_of(before), results_of(after), strict=False))
    results = {
        right: _Compared(left, right, (demanded or {}).get(index, EVERYTHING), old, new)
        for index, (left, right) in enumerate(pairs)
    }
    if all(result.gap < tolerance for result in results.values()):
        return None
    roots = [(left, (demanded or {}).get(index, EVERYTHING)) for index, (left, _) in enumerate(pairs)]
    demands = analyse(before.graph, roots)
    for node, origin in stems_from(before, after, demands).items():
        demand = demands.on(origin)
        if node.op == "call_function" and node.target not in UNSET and demand is not NOTHING:
            compared = _Compared(origin, node, demand, old, new)
            if not compared.gap < tolerance:
                return compared.difference()
    return next(result.difference() for result in results.values() if not result.gap < tolerance)


class _Compared:
    """A node before and after, on the rows that are demanded."""

    def __init__(
        self, before: Node, after: Node, demand: Demand, old: Mapping[Node, Any], new: Mapping[Node, Any]
    ) -> None:
        self.before, self.after, self.demand = before, after, demand
        self.left, self.right = old.get(before), new.get(after)
        self.gap = 0.0
        if isinstance(self.left, Tensor) and isinstance(self.right, Tensor):
            selected = demand.selected if isinstance(demand, Rows) else None
            index = None if selected is None else old[selected.index]
            left, right = (demanded_rows(value, demand, index) for value in (self.left, self.right))
            self.gap = worst([left], [right])

    def difference(self) -> Difference:
        stack = list((self.after.meta.get("nn_module_stack") or {}).values())
        return Difference(
            self.after.name,
            self.before.name,
            str(self.after.target),
            str(stack[-1][0]) if stack else "",
            tuple(getattr(self.right, "shape", ())),
            tuple(getattr(self.left, "shape", ())),
            "all rows" if self.demand is EVERYTHING else str(self.demand),
            self.gap,
        )


def demanded_rows(value: Tensor, demand: Demand, index: Tensor | None = None) -> Tensor:
    """These rows of a value; the value itself if it has no more, or is not made of such rows. `index`: the positions of
    selected ones.
    """
    if not isinstance(demand, Rows) or demand.dim >= value.dim():
        return value
    length, rest = divmod(value.shape[demand.dim], number(demand.blocks))
    chosen = 0 if index is None or demand.selected is None else index.shape[-1] * demand.selected.each
    return value if rest or length <= demand.last + chosen else take(value, demand, index)


def values_of(module: GraphModule, inputs: Sequence[Any]) -> dict[Node, Any]:
    """The value of every node, in one run; inputs that the graph writes into are copied first."""
    found: dict[Node, Any] = {}

    class Run(Interpreter):
        def run_node(self, node: Node) -> Any:
            found[node] = super().run_node(node)
            return found[node]

    copies = [x.clone() if isinstance(x, Tensor) and not isinstance(x, nn.Parameter) else x for x in inputs]
    with torch.no_grad():
        Run(module, garbage_collect_values=False).run(*copies)
    return found


def stems_from(before: GraphModule, after: GraphModule, demands: Demands | None = None) -> dict[Node, Node]:
    """For nodes of a rewritten graph, in order: the node of the graph before that calls the same on the same."""
    return _Ancestry(before, demands or analyse(before.graph)).of(after)


class _Ancestry:
    """Which nodes of a graph each node of its rewrite may stem from."""

    def __init__(self, before: GraphModule, demands: Demands) -> None:
        self.before, self.demands = before, demands
        self.by_name: dict[str, Node] = {node.name: node for node in before.graph.nodes}
        self.may_be: dict[Node, set[Node]] = {}

    def of(self, after: GraphModule) -> dict[Node, Node]:
        """See `stems_from`."""
        found: dict[Node, Node] = {}
        given = {(n.op, n.target): n for n in self.before.graph.nodes if n.op in ("placeholder", "get_attr")}
        for node in after.graph.nodes:
            origin = given.get((node.op, node.target)) if node.op != "call_function" else self._origin(node)
            if origin is not None:
                found[node] = origin
                self.may_be[node] = {origin}
            elif node.target is aten.slice.Tensor:
                self.may_be[node] = set(self._cut(node.args[0]))
        return found

    def _cut(self, source: Node) -> Iterator[Node]:
        """What a slice that a rewrite made may be: what it was cut from, or any slice of that."""
        for origin in self.may_be.get(source, ()):
            yield origin
            yield from (reader for reader in origin.users if reader.target is aten.slice.Tensor)

    def _origin(self, node: Node) -> Node | None:
        related = {
            reader
            for operand in node.all_input_nodes
            for origin in self.may_be.get(operand, ())
            for reader in _readers(origin)
        }
        alike = [(self._agree(node, other), other) for other in related if other.target == node.target]
        sure = [
            ((score[0], self._fits(node, other), score[1], other.name == node.name), other)
            for score, other in alike
            if score is not None and score[0]
        ]
        if sure:
            best = max(score for score, _ in sure)
            return next(other for other in self.by_name.values() if (best, other) in sure)
        namesake = self.by_name.get(node.name)
        if namesake is not None and namesake.target == node.target and self._agree(node, namesake) is not None:
            return namesake
        return None

    def _fits(self, node: Node, other: Node) -> bool:
        """Whether a value has the shape of the demanded rows of the other."""
        mine, theirs, demand = node.meta.get("val"), other.meta.get("val"), self.demands.on(other)
        if not isinstance(mine, Tensor) or not isinstance(theirs, Tensor):
            return True
        size = list(map(number, theirs.shape))
        if isinstance(demand, Rows):
            size[demand.dim] = number(demand.length * demand.blocks)
        return size == list(map(number, mine.shape))

    def _agree(self, node: Node, other: Node) -> tuple[int, int] | None:
        """How many operands stem from the other's, and how many settings are equal; None if any cannot be the same."""
        left, right = tree_leaves([node.args, node.kwargs]), tree_leaves([other.args, other.kwargs])
        if len(left) != len(right):
            return None
        operands = settings = 0
        for mine, theirs in zip(left, right, strict=True):
            if isinstance(mine, Node) != isinstance(theirs, Node):
                return None
            if not isinstance(mine, Node):
                settings += mine == theirs
            elif mine in self.may_be:
                if not self.may_be[mine] & set(_sources(theirs)):
                    return None
                operands += 1
        constants = sum(not isinstance(value, Node) for value in left)
        return None if node.target is aten.slice.Tensor and settings < constants else (operands, settings)


def _readers(node: Node) -> Iterator[Node]:
    """Who reads a value, by itself or through what is seen through."""
    for reader in node.users:
        yield reader
        if reader.target in SEEN_THROUGH:
            yield from _readers(reader)


def _sources(node: Node) -> Iterator[Node]:
    """A value, and where its rows were taken from."""
    yield node
    if node.target in SEEN_THROUGH:
        for operand in node.all_input_nodes:
            yield from _sources(operand)
