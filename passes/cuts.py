"""What the maps of a late layer predict: its input, or the projections that its states are made of. Changes nothing.

    x_l [B, N, d] -> norm -> linear -> k [B, N, w] -> norm, rotation, heads -> K          a state write
                  -> norm -> linear -> v [B, N, w] -> heads -> V                          another
                  -> queries, attention, MLP, ...

A *cut* is a value [batch, rows, width] that is predicted on filled rows: everything the layer writes there depends on
the tokens through its cuts alone. The layer's input is one for all states. A projection is the nearest product with a
weight that every path from the input to a state goes through, told by dominators; states of one fused projection share
it. Norms and rotations behind a projection run on what was predicted; what lies before it runs on no filled row.

The maps of a layer are one matrix: the rows that predict its first cut, below them those of its second, ...
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import networkx as nx
import torch
from torch.fx import Node

from ridgefill_compile.errors import CannotFill
from ridgefill_compile.passes.calls import aten, shape
from ridgefill_compile.passes.demand import analyse
from ridgefill_compile.passes.layout_rules import reshape
from ridgefill_compile.passes.locate import Layer, Located
from ridgefill_compile.passes.rows import Rows, same
from ridgefill_compile.passes.rules import rule_for
from ridgefill_compile.splitmaps import INPUT

PRODUCTS = (aten.linear.default, aten.matmul.default, aten.mm.default, aten.addmm.default)


@dataclass(frozen=True)
class Cut:
    """A value of a late layer that is predicted on filled rows.

    Attributes:
        layer: index of the layer.
        value: [batch, rows, width], laid out as the layer's input.
        start: the first row of the layer's matrix that predicts it.
    """

    layer: int
    value: Node
    start: int = 0

    @property
    def width(self) -> int:
        """Columns of the value, rows of its map."""
        return int(shape(self.value)[-1])


def cuts_of(located: Located, split: int, where: str) -> tuple[Cut, ...]:
    """The cuts of all layers behind the split, layer by layer, in the order in which they are computed.

    Args:
        located: anatomy of a captured graph.
        split: first late layer; its own input is exact, so it has none.
        where: one of `splitmaps.CUTS`.

    Raises:
        CannotFill: a late layer writes a state that no projection of its rows leads to: the state of a recurrence, say.
    """
    late = located.layers[split + 1 :]
    if where == INPUT:
        return tuple(Cut(layer.index, layer.input) for layer in late)
    return tuple(cut for layer in late for cut in _projections(located, layer))


def widths_of(cuts: tuple[Cut, ...]) -> dict[int, tuple[int, ...]]:
    """Layer -> the widths of its cuts."""
    return {layer: tuple(c.width for c in cuts if c.layer == layer) for layer in dict.fromkeys(c.layer for c in cuts)}


def _projections(located: Located, layer: Layer) -> Iterator[Cut]:
    flow: nx.DiGraph[Node] = nx.DiGraph()
    flow.add_node(layer.input)
    node, last = layer.input, max(layer.states)
    while node is not last:
        node = node.next
        flow.add_edges_from((operand, node) for operand in node.all_input_nodes if operand in flow)
    above = {**nx.immediate_dominators(flow, layer.input), layer.input: layer.input}
    start = 0
    for value in sorted({_projection(located, layer, state, above) for state in layer.states}):
        cut = Cut(layer.index, value, start)
        yield cut
        start += cut.width


def _projection(located: Located, layer: Layer, state: Node, above: dict[Node, Node]) -> Node:
    """The nearest projection that a state is made of, row by row.

    Raises:
        CannotFill: there is none.
    """
    value: Node | None = None  # what a product may have been brought back into the input's layout as
    node = state
    while node is not layer.input and node in above:
        if _laid_out_as(node, layer.input):
            value = node
        if _is_projection(node, above) and value is not None and _is_layout_of(value, node):
            through = _row_by_row(located, state, value)
            if through and _row_by_row(located, value, layer.input, located.row_dim):
                return value
        node = above[node]
    raise CannotFill(
        f"layer {layer.index} writes a state that no projection of its rows leads to, one row to one: "
        "the state of a recurrence, or what experts write",
        state,
        "calibrate maps with cut='input'",
    )


def _laid_out_as(node: Node, source: Node) -> bool:
    """Whether a value is the source's rows with columns of its own."""
    if not isinstance(node.meta.get("val"), torch.Tensor) or len(shape(node)) != len(shape(source)):
        return False
    return all(same(*sizes) for sizes in zip(shape(node)[:-1], shape(source)[:-1], strict=True))


def _is_projection(node: Node, above: dict[Node, Node]) -> bool:
    """Whether a node is a product of one value that depends on the layer's input, and weights."""
    return node.target in PRODUCTS and sum(operand in above for operand in node.all_input_nodes) == 1


def _is_layout_of(value: Node, product: Node) -> bool:
    """Whether a value is a product, or that in another shape."""
    while value is not product and rule_for(value) is reshape:
        value = value.all_input_nodes[0]
    return value is product


def _row_by_row(located: Located, value: Node, source: Node, own: int | None = None) -> bool:
    """Whether entry i of a dimension of a value (any, or its `own`) is made of row i of the source alone."""
    for dim in range(len(shape(value))) if own is None else (own,):
        demand = analyse(value.graph, [(value, Rows(dim, 1))], stop=source).on(source)
        if isinstance(demand, Rows) and demand.dim == located.row_dim and demand.last == 1 and same(demand.blocks, 1):
            return True
    return False
