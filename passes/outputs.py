"""What a late layer may leave the graph, and what may not: states for later rows, not rows somebody asked to see.

A filled row has keys and values, and the update of a recurrent state. It has no true logits, hidden states, queries,
attention weights or router scores. Whether an output is one or the other is told from the graph: by what it is made of,
and by who else reads it. Changes nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from ridgefill_compile.errors import CannotFill
from ridgefill_compile.passes.arithmetic_rules import pointwise
from ridgefill_compile.passes.calls import arguments, aten, shape
from ridgefill_compile.passes.demand import Demands, analyse, needed_of
from ridgefill_compile.passes.functionalize import COPIES
from ridgefill_compile.passes.layout_rules import cat, expand, pad, reshape, select, slice_, squeeze, unsqueeze
from ridgefill_compile.passes.locate import Layer, Located, same_shape
from ridgefill_compile.passes.rows import EVERYTHING, NOTHING, Demand, IntLike, Rows, same
from ridgefill_compile.passes.rules import rule_for
from ridgefill_compile.recurrences.table import RECURRENCES

LAYOUTS = (cat, select, slice_, reshape, unsqueeze, squeeze, expand, pad)


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
        for state in layer.states:
            whole = analyse(graph, [(state, EVERYTHING)], stop=layer.input).on(layer.input)
            if _on_rows(whole, located) and whole.last <= tail:  # type: ignore[union-attr]
                continue
            found = [analyse(graph, [(state, Rows(dim, 1))], stop=layer.input) for dim in range(len(shape(state)))]
            if any(_on_rows(demands.on(layer.input), located) for demands in found):
                _check_read(graph, located, layer, state)
                continue
            if len(found) > 1 and not any(counts_rows(size, located.rows) for size in shape(state)):
                _check_read(graph, located, layer, state)
                continue
            by_row = [demands for dim, demands in enumerate(found) if same(shape(state)[dim], located.rows)]
            mixer, hint = next(
                filter(None, (_mixer(graph, each, layer.input, located.rows) for each in by_row)), (state, "")
            )
            raise CannotFill(
                f"layer {layer.index} has an output that is neither written row by row nor the state of a recurrence: "
                "attention weights, router scores, or a state whose size is the prompt's length by chance",
                mixer,
                hint or "do not ask for such outputs",
            )
    _check_own_layer(graph, located, split)


def _on_rows(demand: Demand, located: Located) -> bool:
    """Whether some of a layer input's rows are demanded, and not all of it, nor some of its columns."""
    return isinstance(demand, Rows) and demand.dim == located.row_dim and same(demand.blocks, 1)


def _check_read(graph: Graph, located: Located, layer: Layer, state: Node) -> None:
    """A state is for other rows: the layer itself lets one row read others of it, as of keys, or a scan ends with it.

    A query is read by its own row. What keys are made of is read by other rows through the keys alone, which are states
    of their own: so nothing is looked for behind the layer's other states.

    Raises:
        CannotFill: naming the output.
    """
    forms = list(_forms(state, located, layer))
    if _ends_a_scan(forms[-1]):
        return
    apart = [theirs for other in layer.states if (theirs := list(_forms(other, located, layer)))]
    apart = [theirs for theirs in apart if set(theirs).isdisjoint(forms)]  # keys that serve as values are one state
    if any(_mixes(graph, located, layer, apart, theirs[-1], forms) for theirs in apart):
        return
    others = {form for theirs in apart for form in theirs}
    read = analyse(graph, [(_end(located, layer), Rows(located.row_dim, 1))], stop=layer.input, barrier=others)
    if all(_is_one(read.on(form)) for form in forms) and not _carries_on(graph, layer, forms[-1], read):
        raise CannotFill(
            f"layer {layer.index} has an output that no later row reads: a query, a normed input, logits or hidden "
            "states of a layer, which filled rows do not have",
            state,
            "do not ask for such outputs (forward hooks and early exits count)",
        )


def _mixes(
    graph: Graph, located: Located, layer: Layer, apart: list[list[Node]], other: Node, forms: list[Node]
) -> bool:
    """Whether one row of another state is made of several rows of a state: what a convolution keeps of the results of
    attention, of keys and values. What is made row by row, as keys are of normed inputs, is not.
    """
    states = {*forms, *(form for theirs in apart if other not in theirs for form in theirs)}
    for dim in range(len(shape(other))):
        around = analyse(graph, [(other, Rows(dim, 1))], stop=layer.input, barrier=states).on(layer.input)
        if _on_rows(around, located):  # `dim` counts rows: the query's
            made = analyse(graph, [(other, Rows(dim, 1))], stop=layer.input)
            return not all(_is_one(made.on(form)) for form in forms)
    return False


def _carries_on(graph: Graph, layer: Layer, state: Node, read: Demands) -> bool:
    """Whether a state is what becomes of a former one, `old * decay + new`, say, which the layer's rows read: a
    recurrence that is written out.
    """
    seen, ahead = {state}, [state]
    while ahead:
        node = ahead.pop()
        if rule_for(node) not in (pointwise, *LAYOUTS):
            continue
        for old in node.all_input_nodes:
            if old in seen or not isinstance(old.meta.get("val"), torch.Tensor) or not _ends_alike(old, state):
                continue
            made = analyse(graph, [(old, EVERYTHING)], stop=layer.input).on(layer.input)
            if made is NOTHING and read.on(old) is not NOTHING:
                return True
            seen.add(old)
            ahead.append(old)
    return False


def _ends_alike(old: Node, state: Node) -> bool:
    """Whether a former state has the last sizes of a new one: one that is learned may be the same for all sequences."""
    pairs = zip(reversed(shape(old)), reversed(shape(state)), strict=False)
    return len(shape(old)) > 1 and all(same(a, b) or same(a, 1) for a, b in pairs)


def _is_one(demand: Demand) -> bool:
    return demand is NOTHING or (isinstance(demand, Rows) and demand.last == 1)


def _end(located: Located, layer: Layer) -> Node:
    """What a layer is for: the next one's input, or the trunk's last value like its own."""
    if layer.index + 1 < len(located.layers):
        return located.layers[layer.index + 1].input
    after = [node for node in located.trunk if node > layer.states[0] and len(shape(node)) > located.row_dim]
    return next((node for node in reversed(after) if same_shape(node, layer.input)), after[-1])


def _forms(state: Node, located: Located, layer: Layer) -> Iterator[Node]:
    """A state and what it is in another layout, or some rows of: what the layer itself may read in its place."""
    while state is not layer.input:
        yield state
        rule = rule_for(state)
        above = arguments(state)["tensors"][-1] if rule is cat else state.args[0] if state.args else None
        if not isinstance(above, Node) or not isinstance(above.meta.get("val"), torch.Tensor):
            break
        is_cut = rule in (slice_, select) and not same_shape(state, above)
        if is_cut and _cuts_columns(above, arguments(state)["dim"], located.rows):
            break
        laid_out = rule in LAYOUTS or getattr(rule, "__qualname__", "").startswith("permutation.")
        if not laid_out and state.target not in COPIES:
            break
        state = above


def _cuts_columns(value: Node, dim: int, rows: IntLike) -> bool:
    """Whether a cut along a dimension leaves some columns of every row: of a fused projection, the queries, say."""
    sizes = list(shape(value))
    return not same(sizes.pop(dim), rows) and any(counts_rows(size, rows) for size in sizes)


def _ends_a_scan(value: Node) -> bool:
    """Whether a value is made of nothing but the state that a recurrence leaves."""
    while len(value.all_input_nodes) == 1:
        source = value.all_input_nodes[0]
        if value.target is operator.getitem and source.target in RECURRENCES:
            return bool(value.args[1] != 0)
        value = source
    return False


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


def _mixer(graph: Graph, demands: Demands, source: Node, rows: IntLike) -> tuple[Node, str] | None:
    """The op nearest to the layer's input that makes one row, or something without rows, of every row; and why."""
    made = {source}

    def has_rows(node: Node) -> bool:
        return isinstance(node.meta.get("val"), torch.Tensor) and any(same(size, rows) for size in shape(node))

    for node in graph.nodes:
        operands = [operand for operand in node.all_input_nodes if operand in made]
        if operands:
            made.add(node)
            demand = demands.on(node)
            if node in demands.blocked:
                return node, f"{node.target} has no row rule"
            whole = any(has_rows(each) and needed_of(each, node, demand) is EVERYTHING for each in operands)
            if whole and (isinstance(demand, Rows) or not has_rows(node)):
                return node, f"{node.target} reads every row"
    return None


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
        if output in located.others:
            fine = _is_of_few_rows(graph, located, output, tail)
        else:
            demand = analyse(graph, [(output, EVERYTHING)]).on(end)
            fine = _on_rows(demand, located) and demand.last <= tail  # type: ignore[union-attr]
        if not fine:
            raise CannotFill(
                "logits, a loss or hidden states of more rows than the tail are wanted, and filled rows have none",
                output,
                f"pass logits_to_keep=k with k at most the tail ({tail}), and no labels or output_hidden_states",
            )


def _is_of_few_rows(graph: Graph, located: Located, output: Node, tail: int) -> bool:
    """Whether an output is made of nothing but tail rows of one trunk value: hidden states of rows that are exact."""
    for value in located.trunk:
        made = analyse(graph, [(output, EVERYTHING)], barrier={value})
        read = made.on(value)
        if _on_rows(read, located) and read.last <= tail and made.on(located.tokens) is NOTHING:  # type: ignore[union-attr]
            return True
    return False
