"""What a late layer may leave the graph, and what may not: states for later rows, not rows somebody asked to see.

A filled row has keys and values, and the update of a recurrent state. It has no true logits, hidden states, queries,
attention weights or router scores. Whether an output is one or the other is told from the graph: by what it is made of,
and by who else reads it. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from ridgefill_compile.errors import CannotFill
from ridgefill_compile.passes.calls import arguments, aten, first_operand, shape
from ridgefill_compile.passes.demand import Demands, analyse
from ridgefill_compile.passes.layout_rules import cat, expand, pad, reshape, select, slice_, squeeze, unsqueeze
from ridgefill_compile.passes.locate import Layer, Located, same_shape
from ridgefill_compile.passes.rows import EVERYTHING, NOTHING, Demand, IntLike, Rows, same
from ridgefill_compile.passes.rules import rule_for

LAYOUTS = (first_operand, cat, select, slice_, reshape, unsqueeze, squeeze, expand, pad)


def check_late_states(graph: Graph, located: Located, split: int, tail: int = 0) -> None:
    """Every late output must be a state: what later rows read, not something the caller asked to see of each row.

    A state is written row by row (row i depends on row i of the layer's input alone: keys, values, ...), or it sums
    rows up and has none itself (the state of a recurrence). Attention weights and router scores of every row are
    neither: they come from behind the layer's attention, which filled rows do not run.

    What is made of tail rows alone is what the model makes of them, whatever it is.

    Raises:
        CannotFill: naming the output and the layer.
    """
    for layer in located.layers[split:]:
        read = _demands_of_next_layer(graph, located, layer)
        for state in layer.states:
            whole = analyse(graph, [(state, EVERYTHING)], stop=layer.input).on(layer.input)
            if (
                isinstance(whole, Rows)
                and whole.dim == located.row_dim
                and same(whole.blocks, 1)
                and whole.last <= tail
            ):
                continue
            found = [_demand_on_input(graph, state, dim, layer.input) for dim in range(len(shape(state)))]
            if any(isinstance(d, Rows) and d.dim == located.row_dim and same(d.blocks, 1) for d, _ in found):
                _check_read_by_other_rows(graph, layer, state, read)
                continue
            if len(found) > 1 and not any(counts_rows(size, located.rows) for size in shape(state)):
                continue
            blocked = [
                nodes[0] for dim, (_, nodes) in enumerate(found) if nodes and same(shape(state)[dim], located.rows)
            ]
            raise CannotFill(
                f"layer {layer.index} has an output that is neither written row by row nor the state of a recurrence: "
                "attention weights, router scores, or a state whose size is the prompt's length by chance",
                blocked[0] if blocked else state,
                f"{blocked[0].target} has no row rule" if blocked else "do not ask for such outputs",
            )
    _check_own_layer(graph, located, split)


def _demands_of_next_layer(graph: Graph, located: Located, layer: Layer) -> Demands:
    """What one row of the next layer's input reads of this layer's values."""
    after = [node for node in located.trunk if node > layer.states[0] and len(shape(node)) > located.row_dim]
    later = located.layers[layer.index + 1].input if layer.index + 1 < len(located.layers) else None
    end = later or next((node for node in reversed(after) if same_shape(node, layer.input)), after[-1])
    return analyse(graph, [(end, Rows(located.row_dim, 1))], stop=layer.input)


def _check_read_by_other_rows(graph: Graph, layer: Layer, state: Node, read: Demands) -> None:
    """A row of a state is read by other rows, as a key is and a query is not; and it is not what states are made of.

    Raises:
        CannotFill: naming the output.
    """
    forms = list(_forms(state, layer))
    demands = [read.on(form) for form in forms]
    alone = all(demand is NOTHING or (isinstance(demand, Rows) and demand.last == 1) for demand in demands)
    others = [form for other in layer.states if other is not state for form in _forms(other, layer)]
    inner = state not in others and any(_is_part_of(graph, state, other, layer) for other in others)
    if alone or inner:
        raise CannotFill(
            f"layer {layer.index} has an output that no later row reads: a query, a normed input, logits or hidden "
            "states of a layer, which filled rows do not have",
            state,
            "do not ask for such outputs (forward hooks and early exits count)",
        )


def _forms(state: Node, layer: Layer) -> Iterator[Node]:
    """A state and what it is in another layout, or some rows of: what the layer itself may read in its place."""
    rows = max((shape(layer.input)[dim] for dim in range(len(shape(layer.input)) - 1)), key=_hint)
    while state is not layer.input:
        yield state
        rule = rule_for(state)
        above = arguments(state)["tensors"][-1] if rule is cat else state.args[0] if state.args else None
        if not isinstance(above, Node) or not isinstance(above.meta.get("val"), torch.Tensor):
            break
        if (
            rule is slice_
            and not same(shape(above)[arguments(state)["dim"]], rows)
            and rule_for(above) not in (pad, cat)
        ):
            break  # some channels rather than some rows
        if not (rule in LAYOUTS or getattr(rule, "__qualname__", "").startswith("permutation.")):
            break
        state = above


def _hint(size: IntLike) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


def _is_part_of(graph: Graph, state: Node, other: Node, layer: Layer) -> bool:
    """Whether a row of one state is made of a row of another: then that one is but a step on the way."""
    if state not in _made_of(other, layer.input):
        return False
    demands = (analyse(graph, [(other, Rows(dim, 1))], stop=layer.input).on(state) for dim in range(len(shape(other))))
    return any(isinstance(demand, Rows) and demand.last == 1 for demand in demands)


def _made_of(value: Node, source: Node) -> set[Node]:
    """Every value between a source and a value."""
    found: set[Node] = set()
    ahead = [value]
    while ahead:
        node = ahead.pop()
        if node not in found and node > source:
            found.add(node)
            ahead.extend(node.all_input_nodes)
    return found - {value}


def counts_rows(size: IntLike, rows: IntLike) -> bool:
    """Whether a dimension may count prompt rows: as many, or a multiple."""
    rest: IntLike = size % rows  # type: ignore[operator]
    return same(rest, 0) and not same(size, 0)


def _check_own_layer(graph: Graph, located: Located, split: int) -> None:
    """No state may be made of what later layers compute: it would change with them.

    Raises:
        CannotFill: naming the output.
    """
    predicted = {layer.input: layer.index for layer in located.layers[split + 1 :]}
    deepest: dict[Node, int] = {}  # node -> the deepest predicted layer that it depends on
    for node in graph.nodes:
        found = [deepest[operand] for operand in node.all_input_nodes if operand in deepest]
        found += [predicted[node]] if node in predicted else []
        if found:
            deepest[node] = max(found)
    for layer in located.layers:
        for state in layer.states:
            if deepest.get(state, -1) > max(layer.index, split):
                raise CannotFill(
                    "an output is made of what several late layers compute, so it belongs to none of them",
                    state,
                    "do not ask for such outputs (a loss over all layers, say)",
                )


def _demand_on_input(graph: Graph, state: Node, dim: int, source: Node) -> tuple[Demand, list[Node]]:
    """What one row of a state write reads of its layer's input, and which ops made that more than it need be."""
    demands = analyse(graph, [(state, Rows(dim, 1))], stop=source)
    return demands.on(source), demands.blocked


def check_wanted_rows(graph: Graph, located: Located, tail: int) -> None:
    """The results may read the trunk's end on tail rows only: a filled row has no true logits or hidden states.

    Raises:
        CannotFill: naming the output and how to ask for less.
    """
    for node in located.trunk:
        length = shape(node)[located.row_dim] if len(shape(node)) > located.row_dim else 1
        if node.target is aten.slice.Tensor and isinstance(length, torch.SymInt):
            bool(length <= tail)  # one guard: from here on it is known that no more (or more) rows are wanted
    last = located.layers[-1].input
    end = next((node for node in reversed(located.trunk) if same_shape(node, last)), located.trunk[-1])
    for output in (located.result, *located.others):
        demand = analyse(graph, [(output, EVERYTHING)]).on(end)
        few = isinstance(demand, Rows) and demand.dim == located.row_dim and same(demand.blocks, 1)
        if output in located.others or not (few and demand.last <= tail):  # type: ignore[union-attr]
            raise CannotFill(
                "logits, a loss or hidden states of more rows than the tail are wanted, and filled rows have none",
                output,
                f"pass logits_to_keep=k with k at most the tail ({tail}), and no labels or output_hidden_states",
            )
