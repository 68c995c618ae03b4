"""What a filled graph may cost, worked out without the row rules: from the routed graph and ancestry alone.

Of a late layer, whatever its state writes are computed from must run on every row, and so must what is computed from
states alone (keys and values that unfold from a cached latent); all else is read on the tail only.

    cost(node) = all rows        before the first late layer, in a map, an ancestor of its layer's state writes, or
                                 computed from those alone
                 the tail's share  elsewhere: T / N of it, or the causal pairs of the last T queries

Behind the last layer that writes states, only the rows whose logits are wanted count as the tail. A node that does not
work on the prompt's rows keeps its whole cost, so the form is what elimination may cost at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch.fx import GraphModule, Node

from ridgefill_compile.cost import counter_of
from ridgefill_compile.passes.calls import arguments, aten, shape
from ridgefill_compile.passes.locate import Located

EARLY = -1


class LateLayers:
    """Which late layer each node of a routed graph belongs to, and which nodes its state writes need.

    Attributes:
        of: the late layer of each node, or `EARLY`.
        needed: ancestors of a late layer's state writes within that layer, and what is computed from states alone.
    """

    def __init__(self, routed: GraphModule, located: Located, split: int) -> None:
        self.by_name: dict[str, Node] = {node.name: node for node in routed.graph.nodes}
        self.located = located
        self.inputs: dict[Node, int] = {self._node(located.layers[split].input): split}
        self.maps: set[Node] = set()
        for layer in located.layers[split + 1 :]:
            merged, predicted = self._merged(self._node(layer.input))
            self.inputs[merged] = layer.index
            self.maps.add(predicted)
        self.of: dict[Node, int] = {}
        for node in routed.graph.nodes:
            above = max((self.of[operand] for operand in node.all_input_nodes), default=EARLY)
            self.of[node] = EARLY if node in self.maps else self.inputs.get(node, above)
        self.needed: set[Node] = set()
        for layer in located.layers[split:]:
            states = [self._node(state) for state in layer.states]
            self._need(layer.index, list(states))
            self._unfold(layer.index, {value for state in states for value in self._uncut(state)})

    def _node(self, node: Node) -> Node:
        """A node of the captured graph, as the routed graph names it."""
        return self.by_name[node.name]

    def _merged(self, value: Node) -> tuple[Node, Node]:
        """What a late layer reads instead of its true input, and the prediction in it."""
        for exact in value.users:
            for reader in exact.users:
                parts = arguments(reader)["tensors"] if reader.target is aten.cat.default else []
                if len(parts) == 2 and parts[1] is exact:
                    return reader, parts[0]
        raise ValueError(f"no merged input was found for {value}")

    def _need(self, layer: int, ahead: list[Node]) -> None:
        while ahead:
            node = ahead.pop()
            if node in self.needed or self.of[node] != layer or node in self.inputs:
                continue
            self.needed.add(node)
            ahead.extend(node.all_input_nodes)

    def _uncut(self, state: Node) -> Iterator[Node]:
        """A state write, and the rows it was cut from: a sliding layer keeps the last ones, and reads all."""
        yield state
        while state.target is aten.slice.Tensor:
            given = arguments(state)
            state = given["self"]
            if shape(state)[given["dim"]] != self.located.rows:
                break
            yield state

    def _unfold(self, layer: int, from_states: set[Node]) -> None:
        """Values of a layer that depend on its input through state writes alone."""
        for node in self.of:
            mine = [operand for operand in node.all_input_nodes if self.of[operand] == layer]
            if node not in from_states and node not in self.inputs and mine and from_states.issuperset(mine):
                from_states.add(node)
        self.needed |= from_states


@dataclass(frozen=True)
class NodeCost:
    """Multiply-adds of one node on every row, and what it may cost when rows are eliminated."""

    whole: Fraction
    allowed: Fraction


def closed_form(routed: GraphModule, located: Located, split: int, tail: int, kept: int) -> dict[Node, NodeCost] | None:
    """Multiply-adds of each costed node of a routed graph; None where shapes depend on data.

    Args:
        routed: a routed graph of static shapes.
        located: the anatomy of the graph that was routed.
        split: first late layer.
        tail: exact tail rows.
        kept: how many rows of logits the model returns.
    """
    layers = LateLayers(routed, located, split)
    last = located.layers[-1].index
    found: dict[Node, NodeCost] = {}
    for node in routed.graph.nodes:
        counter = counter_of(node)
        if counter is None:
            continue
        count = counter(node)
        if not count.is_Rational or not isinstance(located.rows, int):
            return None
        whole = Fraction(int(count.p), int(count.q))
        layer, share = layers.of[node], Fraction(1)
        if layer != EARLY and node not in layers.needed:
            share = _share(node, located.rows, min(kept, tail) if layer == last else tail)
        found[node] = NodeCost(whole, whole * share)
    return found


def _share(node: Node, rows: int, tail: int) -> Fraction:
    """What part of a node's work the last `tail` of `rows` rows are."""
    if node.target is aten.scaled_dot_product_attention.default and arguments(node).get("is_causal", False):
        return Fraction(tail * rows - tail * (tail - 1) // 2, rows * (rows + 1) // 2)
    return (
        Fraction(tail, rows) if any(_has_rows(shape(value), rows) for value in (node, *_tensors(node))) else Fraction(1)
    )


def _has_rows(sizes: Iterable[int | torch.SymInt], rows: int) -> bool:
    return any(size != 0 and size % rows == 0 for size in sizes)


def _tensors(node: Node) -> list[Node]:
    return [operand for operand in node.all_input_nodes if isinstance(operand.meta.get("val"), torch.Tensor)][:1]
