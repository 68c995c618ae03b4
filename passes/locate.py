r"""Where the layers are, found by graph theory: no module names, no patterns. Changes nothing.

Take the values that depend on the tokens, as a flow graph from their embedding to the graph's last result, the
logits. A value that *every* path passes through is a dominator; the dominators of the result form the *trunk*: in a
residual decoder, the residual stream at and between the layers, since each block has a path around it.

    tokens -> x_0 -> .. -> x_1 -> .. -> x_2 -> .. -> norm -> logits          trunk
               \\-> K_0,V_0  \\-> K_1,V_1  \\-> K_2,V_2                        state writes, each off its layer

A *state write* is another output: a key, a value, ... It leaves the trunk at the deepest trunk value that dominates
it. State writes that leave at one value belong to one layer, and that value is the layer's input: everything the layer
writes depends on the tokens through it alone, so predicting it predicts them. It stands before the layer's own norm
(the norm's result is no dominator: the residual passes around it), which is what the maps are fitted to.

An output *on* the trunk is not a state: it is a hidden state or logits that somebody wants. Nor is one that leaves
where no other row looks back, such as a router's scores between attention and MLP: a state is there for later rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import networkx as nx
import torch
from torch.fx import Graph, Node

from ridgefill_compile.errors import CannotFill
from ridgefill_compile.passes.calls import arguments, aten, needs, shape
from ridgefill_compile.passes.demand import analyse
from ridgefill_compile.passes.rows import EVERYTHING, IntLike, Rows, same
from ridgefill_compile.passes.rules import rule_for

STATE_UPDATES = {
    aten.index_copy.default: "source",
    aten.index_put.default: "values",
    aten.slice_scatter.default: "src",
    aten.select_scatter.default: "src",
    aten.scatter.src: "src",
    aten.copy_.default: "src",
    aten.copy.default: "src",
}


@dataclass(frozen=True)
class Layer:
    """One layer that writes states.

    Attributes:
        index: counted from 0, over the layers that write states.
        input: the value all its state writes depend on, e.g. [batch, rows, hidden].
        states: the values it writes, before they join older ones in a cache.
    """

    index: int
    input: Node
    states: tuple[Node, ...]

    @property
    def width(self) -> int:
        """Hidden size of the layer's input."""
        return int(shape(self.input)[-1])

    @property
    def name(self) -> str:
        """Qualified name of the module the states come from, where known."""
        stack = list((self.states[0].meta.get("nn_module_stack") or {}).values())
        return str(stack[-1][0]) if stack else f"layer {self.index}"


@dataclass(frozen=True)
class Located:
    """A decoder's anatomy in a captured graph.

    Attributes:
        tokens: the embedding of the prompt, [batch, rows, hidden] (or [rows, hidden]).
        row_dim: dimension of every layer input that counts rows.
        layers: in order.
        trunk: values that every path from tokens to result passes, in order.
        result: the last token-dependent output: logits, or hidden states of a headless model.
        others: further outputs that are no states: hidden states, router scores, ... that somebody asked for.
    """

    tokens: Node
    row_dim: int
    layers: tuple[Layer, ...]
    trunk: tuple[Node, ...]
    result: Node
    others: tuple[Node, ...]

    @property
    def rows(self) -> IntLike:
        """Prompt rows."""
        return shape(self.layers[0].input)[self.row_dim]


def locate(graph: Graph) -> Located:
    """Find the layers of a captured decoder.

    Raises:
        CannotFill: no value looks like tokens flowing through layers that write states.
    """
    outputs = list(dict.fromkeys(_outputs(graph)))
    found: list[Located] = []
    for source in _sources(graph):
        located = _locate_from(graph, source, [source], outputs)
        if located is not None and len(located.layers) == 1:  # something may lead round all of them
            located = _locate_from(graph, source, first_mixing(graph, source), outputs) or located
        if located is not None:
            found.append(located)
    if not found:
        raise CannotFill(
            "no layers were found: no output is written by a layer off a residual stream",
            hint="run the model with a cache (use_cache=True), on input_ids or inputs_embeds",
        )
    return max(found, key=lambda located: len(located.layers))


def _sources(graph: Graph) -> Iterator[Node]:
    """Values that may be the embedded prompt: looked-up embeddings, and float inputs with three dimensions."""
    for node in graph.nodes:
        if node.target is aten.embedding.default:
            yield node
        elif node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor):
            value = node.meta["val"]
            if value.dim() == 3 and value.is_floating_point() and not isinstance(value, torch.nn.Parameter):
                yield node


def _outputs(graph: Graph) -> Iterator[Node]:
    """Values that leave the graph: its results and what it writes into its inputs."""
    for node in graph.nodes:
        if node.op == "output":
            yield from (n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor))
        elif node.target is aten.copy_.default:
            yield node.args[1]


def first_mixing(graph: Graph, source: Node) -> list[Node]:
    """Where rows of the prompt first meet: values that are no function of one row alone, of nothing but such.

    What lies before, each row's own embeddings, is there for every row whatever is filled. Some decoders hand it to
    every layer, round the residual stream; the flow that matters starts behind it.
    """
    row_dim: dict[Node, int] = {source: 1 if len(shape(source)) > 2 else 0}
    behind: set[Node] = set()
    found = []
    for node in graph.nodes:
        if node.op != "call_function" or node in row_dim:
            continue
        if any(operand in behind for operand in node.all_input_nodes):
            behind.add(node)
            continue
        own = [operand for operand in node.all_input_nodes if operand in row_dim]
        if not own:
            continue
        dim = _own_row(node, own, row_dim)
        if dim is not None:
            row_dim[node] = dim
        elif isinstance(node.meta.get("val"), torch.Tensor | list | tuple):
            found.append(node)
            behind.add(node)
    return found


def _own_row(node: Node, own: list[Node], row_dim: dict[Node, int]) -> int | None:
    """The dimension of a value whose entry i is made of rows i of its operands, by the rule of its op."""
    rule = rule_for(node)
    value = node.meta.get("val")
    value = value[0] if isinstance(value, list | tuple) and value else value
    if rule is None or not isinstance(value, torch.Tensor):
        return None
    for dim in range(value.dim()):
        call = rule(node, Rows(dim, 1))
        read = list(needs((*call.args, *call.kwargs.values()))) if call is not None else []
        rows = {need.node: need.rows for need in read if same(need.rows.blocks, 1) and need.rows.last == 1}
        if all(operand in rows and rows[operand].dim == row_dim[operand] for operand in own):
            return dim
    return None


def _locate_from(graph: Graph, source: Node, starts: list[Node], outputs: list[Node]) -> Located | None:
    """The anatomy as seen from one candidate for the embedded prompt, on the flow that begins at some values."""
    flow: nx.DiGraph[Node] = nx.DiGraph()
    flow.add_edges_from((graph._root, start) for start in starts)
    for node in graph.nodes:
        if node.op != "output" and node not in starts:
            flow.add_edges_from((operand, node) for operand in node.all_input_nodes if operand in flow)
    reached = [node for node in outputs if node in flow and node is not source]
    if not reached:
        return None
    result = max(reached)
    above = nx.immediate_dominators(flow, graph._root)
    trunk = [node for node in _chain(result, above) if isinstance(node.meta.get("val"), torch.Tensor)][::-1]
    place = {node: position for position, node in enumerate(trunk)}
    first = starts[0] if starts == [source] else source
    states: dict[Node, list[Node]] = {}
    others = []
    for output in _dependent(graph, source, outputs):
        if output in place:
            others.append(output)
        else:
            for value in _dependent(graph, source, written_values(output)):
                chain = _chain(value, above) if value in flow else iter(())
                root = next((node for node in chain if node in place), first)
                states.setdefault(root, []).append(value)
    place.setdefault(first, -1)
    roots = sorted(states, key=lambda node: place[node])
    row_dim = _row_dim(roots[-1], source) if roots else None
    if row_dim is None:
        return None
    inputs = [root for root, end in zip(roots, _ends(roots, trunk), strict=True) if _mixes(graph, root, end, row_dim)]
    others += [state for root in roots if root not in inputs for state in states[root]]
    if not inputs:
        return None
    layers = tuple(
        Layer(i, _one_stream(root, states[root], above, source), tuple(states[root])) for i, root in enumerate(inputs)
    )
    row_dim = _row_dim(layers[-1].input, source)
    if row_dim is None:
        return None
    return Located(source, row_dim, layers, tuple(trunk), result, tuple(o for o in others if o is not result))


def _dependent(graph: Graph, source: Node, outputs: list[Node]) -> list[Node]:
    """The outputs that depend on the prompt."""
    flow = {source}
    for node in graph.nodes:
        if any(operand in flow for operand in node.all_input_nodes):
            flow.add(node)
    return [output for output in outputs if output in flow and output is not source]


def _one_stream(root: Node, states: list[Node], above: dict[Node, Node], source: Node) -> Node:
    """A layer's input where the trunk is several residual streams: the value its states read of them.

    Streams [batch, rows, streams, hidden] have a dimension more than the embedding. What a layer writes reads one
    mixture of them, [batch, rows, hidden], which every one of its states goes through.
    """
    rank = len(shape(source))
    if len(shape(root)) <= rank:
        return root
    chains = [[node for node in _chain(state, above) if node > root] for state in states if state in above]
    common = [node for node in reversed(chains[0]) if all(node in chain for chain in chains)] if chains else []
    return next((node for node in common if len(shape(node)) == rank), root)


def _ends(roots: list[Node], trunk: list[Node]) -> list[Node]:
    """For each value that outputs leave the trunk at, the trunk value up to which they were of use."""
    alike = [node for node in trunk if same_shape(node, roots[-1]) and node > roots[-1]]
    return [*roots[1:], alike[-1] if alike else trunk[-1]]


def _mixes(graph: Graph, root: Node, end: Node, row_dim: int) -> bool:
    """Whether a row of `end` reads other rows of `root`. If not, what leaves the trunk at `root` is no state."""
    wanted = Rows(row_dim, 1) if len(shape(end)) > row_dim else EVERYTHING
    demand = analyse(graph, [(end, wanted)], stop=root).on(root)
    return not (isinstance(demand, Rows) and demand.dim == row_dim and demand.last == 1)


def _chain(node: Node, above: dict[Node, Node]) -> Iterator[Node]:
    """A node and its dominators, deepest first."""
    while node.op != "root":
        yield node
        node = above[node]


def written_values(output: Node) -> list[Node]:
    """What a cache update writes: the new keys rather than the whole buffer they go into, layer by layer if it is one
    buffer for all of them.
    """
    found: list[Node] = []
    ahead: list[Any] = [output]
    while ahead:
        node = ahead.pop()
        name = STATE_UPDATES.get(node.target)
        if name is not None and isinstance(arguments(node)[name], Node):
            given = arguments(node)
            ahead.append(given[name])
            if isinstance(given.get("self"), Node) and given["self"].target in STATE_UPDATES:
                ahead.append(given["self"])
        elif node.target is aten.stack.default:
            ahead.extend(arguments(node)["tensors"])
        else:
            found.append(node)
    return found


def _row_dim(value: Node, source: Node) -> int | None:
    """The dimension of a layer input that is the prompt's rows.

    Rules carry one row of the value backwards, along every path that narrows. The dimension is the one that arrives at
    the token ids' last dimension (`[batch, rows]` or `[rows]`), or at the middle of embeddings `[batch, rows, hidden]`.
    """
    origin, behind = source, 2
    if source.op == "call_function":
        origin, behind = _first_input(arguments(source)["indices"]), 1
    target = len(shape(origin)) - behind
    found = [dim for dim in range(len(shape(value)) - 1) if (origin, target) in _carried(value, dim)]
    return found[0] if len(found) == 1 else None


def _first_input(node: Node) -> Node:
    """The placeholder that token ids come from, through views and casts."""
    while node.op == "call_function":
        tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        if len(tensors) != 1:
            break
        node = tensors[0]
    return node


def _carried(value: Node, dim: int) -> set[tuple[Node, int]]:
    """Where one row of a dimension is read from, step by step, through ops that narrow."""
    seen: set[tuple[Node, int, str]] = set()
    found: set[tuple[Node, int]] = set()
    ahead = [(value, Rows(dim, 1))]
    while ahead:
        node, rows = ahead.pop()
        if (node, rows.dim, str(rows.blocks)) in seen:
            continue
        seen.add((node, rows.dim, str(rows.blocks)))
        if same(rows.blocks, 1):
            found.add((node, rows.dim))
        rule = rule_for(node)
        call = rule(node, rows) if rule else None
        if call is not None:
            ahead.extend((need.node, need.rows) for need in needs(call.args) if need.rows.last == 1)
    return found


def same_shape(node: Node, other: Node) -> bool:
    """Whether two values have the same shape, whatever the symbols stand for."""
    left, right = shape(node), shape(other)
    return len(left) == len(right) and all(map(same, left, right))
