"""Which states of late layers are keys and which are values, told by who reads them. Changes nothing.

A state is a *key* if a call of attention reads it as its keys, or if the product it enters goes into a softmax; it is a
*value* if a call of attention reads it as its values, or if the product it enters has a softmax's result as its other
factor:

    K -> cache, repeat, ... -> attention(query, .., value)           K -> .. -> matmul(Q, ..) -> scale, mask -> softmax
    V -> cache, repeat, ... -> attention(query, key, ..)             V -> .. -> matmul(softmax(..), ..)

States of recurrences are neither. A state that is read as both, a latent one that keys and values are made of, say, is
left alone, and so is one whose heads or rows cannot be told apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from ridgefill_compile.passes.calls import arguments, aten, positive, shape
from ridgefill_compile.passes.demand import analyse
from ridgefill_compile.passes.find_attention import ATTENTION, FACTORS, comes_from_softmax, softmax_of
from ridgefill_compile.passes.functionalize import COPIES
from ridgefill_compile.passes.layout_rules import reaches_the_end
from ridgefill_compile.passes.locate import Layer, Located
from ridgefill_compile.passes.rows import IntLike, Rows, at_least, same

KEY, VALUE = "key", "value"
BOTH = "keys and values come from one state"
JOINS = (aten.cat.default, aten.concat.default, aten.concatenate.default)


@dataclass(frozen=True)
class AttentionState:
    """Keys or values that a late layer writes.

    Attributes:
        layer: index of the layer.
        role: KEY or VALUE.
        rows: the node that holds the prompt's rows, before they join older ones in a cache, e.g. [batch, heads, N, D].
        row_dim: its dimension that counts rows.
        entry_dim: its dimension that counts the entries of a head.
        batch_dim: its dimension that counts sequences and nothing else, if there is one.
    """

    layer: int
    role: str
    rows: Node
    row_dim: int
    entry_dim: int
    batch_dim: int | None


@dataclass(frozen=True)
class AttentionStates:
    """Of every layer behind the split: its keys and values, and why others are left alone, by layer."""

    found: tuple[AttentionState, ...]
    left_alone: dict[int, str]

    def of(self, role: str) -> tuple[AttentionState, ...]:
        """All keys, or all values."""
        return tuple(state for state in self.found if state.role == role)


def attention_states(graph: Graph, located: Located, split: int) -> AttentionStates:
    """Keys and values of the layers behind the split: those whose input a route predicts.

    Args:
        graph: captured graph; is not changed.
        located: its anatomy.
        split: first late layer.
    """
    found: list[AttentionState] = []
    left_alone: dict[int, str] = {}
    for layer in located.layers[split + 1 :]:
        states: dict[Node, AttentionState | str] = {}
        for state in layer.states:
            rows, known = _state(graph, located, layer, state)
            states[rows] = known
        mine = sorted((s for s in states.values() if isinstance(s, AttentionState)), key=lambda state: state.rows)
        reasons = [state for state in states.values() if isinstance(state, str)]
        if BOTH in reasons or _makes_another([state.rows for state in mine], set(states), layer):
            mine, reasons = [], [BOTH]
        found += mine
        if reasons:
            left_alone[layer.index] = "; ".join(dict.fromkeys(reasons))
    return AttentionStates(tuple(found), left_alone)


def _state(graph: Graph, located: Located, layer: Layer, state: Node) -> tuple[Node, AttentionState | str]:
    """The node that holds a state's new rows, and what it is; or why it is left alone."""
    row_dim = _dim_of(graph, located, layer, state, located.row_dim)
    if row_dim is None:
        return state, "a state without rows"
    rows = _new_rows(state, row_dim)
    if not same(shape(rows)[row_dim], located.rows):
        return rows, "a state whose new rows are not apart from older ones"
    read = dict(_readings(rows, _end_of(located, layer)))
    if len(read) != 1 or not read.keys() <= {KEY, VALUE}:
        return rows, BOTH if read else "a state that no attention reads"
    ((role, head),) = read.items()
    rank = len(shape(rows))
    entry_dim = rank - 2 if row_dim == rank - 1 else rank - 1
    if not at_least(head, shape(rows)[entry_dim]):
        return rows, f"the heads of a {role} are not apart"
    batch_dim = _dim_of(graph, located, layer, rows, 0) if located.row_dim > 0 else None
    return rows, AttentionState(layer.index, role, rows, row_dim, entry_dim, batch_dim)


def _dim_of(graph: Graph, located: Located, layer: Layer, value: Node, dim: int) -> int | None:
    """The dimension of a state whose entry i is made of entry i of a dimension of its layer's input."""
    for own in range(len(shape(value))):
        demand = analyse(graph, [(value, Rows(own, 1))], stop=layer.input).on(layer.input)
        if isinstance(demand, Rows) and demand.dim == dim and demand.last == 1 and same(demand.blocks, 1):
            return own
    return None


def _new_rows(state: Node, row_dim: int) -> Node:
    """A state's rows of this prompt: without older ones in front, cuts and copies."""
    while True:
        given = arguments(state) if hasattr(state.target, "_schema") else {}
        if state.target in JOINS and positive(given["dim"], len(shape(state))) == row_dim:
            state = given["tensors"][-1]
        elif state.target in COPIES or _is_cut(state, given, row_dim):
            state = given["self"]
        else:
            return state


def _is_cut(node: Node, given: dict[str, Any], row_dim: int) -> bool:
    """Whether a call keeps the last rows of its operand, as caches of sliding windows do."""
    if node.target is not aten.slice.Tensor or positive(given["dim"], len(shape(node))) != row_dim:
        return False
    return given["step"] == 1 and reaches_the_end(node)


def _end_of(located: Located, layer: Layer) -> Node:
    """What lies behind a layer: the next one's input, or the result."""
    following = located.layers[layer.index + 1 :]
    return following[0].input if following else located.result


def _readings(value: Node, end: Node) -> Iterator[tuple[str, IntLike]]:
    """As what attention reads a value, before some node, and how many entries its heads have there."""
    seen, ahead = {value}, [value]
    while ahead:
        node = ahead.pop()
        for reader in node.users:
            if reader in seen or not reader < end:
                continue
            roles = list(_roles(reader, node))
            yield from roles
            if not roles:
                seen.add(reader)
                ahead.append(reader)


def _roles(reader: Node, operand: Node) -> Iterator[tuple[str, IntLike]]:
    """As what one call of attention, or one of its two products, reads an operand."""
    if reader.target is ATTENTION:
        given = arguments(reader)
        yield from ((name, shape(operand)[-1]) for name in ("query", KEY, VALUE) if given[name] is operand)
    elif reader.target in FACTORS:
        left, right = (arguments(reader)[name] for name in FACTORS[reader.target])
        if comes_from_softmax(right if operand is left else left):
            yield VALUE, shape(reader)[-1]
        elif softmax_of(reader) is not None:
            yield KEY, shape(left)[-1]


def _makes_another(mine: Iterable[Node], states: set[Node], layer: Layer) -> bool:
    """Whether keys or values lie between their layer's input and another of its states, which would change, too."""
    for state in states:
        seen, ahead = {state}, [state]
        while ahead:
            for operand in ahead.pop().all_input_nodes:
                if operand not in seen and operand > layer.input:
                    seen.add(operand)
                    ahead.append(operand)
        if any(other in seen for other in mine if other is not state):
            return True
    return False
