"""Dead rows, removed: every value is computed on just the rows that somebody reads.

Claim: the outputs, and every effect, are what they were. Before and after, for a layer whose rows but the last T only
feed its keys and values (shapes: B batch, N rows, d hidden, H heads, D head size):

    q = linear(norm)                        [B, N, d]      q = linear(norm[:, -T:])                  [B, T, d]
    k = linear(norm)                        [B, N, d]      k = linear(norm)                          [B, N, d]
    y = attention(q, k, v, causal)          [B, H, N, D]   y = attention(q, k, v, mask of the tail)  [B, H, T, D]
    h = x + mlp(y)                          [B, N, d]      h = x[:, -T:] + mlp(y)                    [B, T, d]

On entry: functional ATen with fake values. On exit: the same, with the same inputs and outputs. The graph is written
afresh, so a refusal half way leaves the old one untouched.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from ridgefill_compile.passes.attend import causal_mask
from ridgefill_compile.passes.calls import CAUSAL_TAIL, TO_THE_END, Call, CausalTail, Need, aten, shape
from ridgefill_compile.passes.demand import Demands, analyse, whole_suffix
from ridgefill_compile.passes.emit import Emitter, fake_mode_of, inputs_of
from ridgefill_compile.passes.functionalize import memory_of
from ridgefill_compile.passes.rows import BLOCKS, EVERYTHING, Demand, IntLike, Rows, covers, same_rows
from ridgefill_compile.passes.rules import narrowed_call
from ridgefill_compile.passes.selected_rows import take_entries, take_rows, with_last
from ridgefill_compile.recurrences.table import RECURRENCES


def eliminate(module: GraphModule, demands: Demands | None = None) -> GraphModule:
    """A graph module with the same results that computes only demanded rows."""
    old = module.graph
    writer = _Writer(old, demands or analyse(old))
    for node in old.nodes:
        writer.write(node)
    keep_apart(old, writer.emit)
    result = GraphModule(module, writer.graph)
    result.meta = dict(module.meta)
    return result


class _Writer:
    """Copies a graph node by node, each on the rows demanded of it."""

    def __init__(self, old: Graph, demands: Demands) -> None:
        self.graph = Graph()
        self.demands = demands
        self.new: dict[Node, Node] = {}
        self.emit = Emitter(self.graph, fake_mode_of(old))
        self.slices: dict[Any, Node] = {}
        self.inputs = set(inputs_of(old))

    def write(self, node: Node) -> None:
        """Copy one node, narrowed if only some of its rows are read, or leave it out if none are."""
        if node not in self.demands.of and node not in self.inputs:
            return
        call = self.demands.calls.get(node) or whole_suffix(node)
        if call is not None and call.target is None:
            need = call.args[0]
            self.new[node] = self.fetch(need.node, need.rows)
        elif call is not None:
            self.new[node] = self.resolve(call, like=node)
            self._narrow_shared_result(node, call)
            for tail in (a for a in (*call.args, *call.kwargs.values()) if isinstance(a, CausalTail)):
                self.new[node].meta[CAUSAL_TAIL] = (shape(tail.query)[-2], tail.rows)
        else:
            self.new[node] = self.graph.node_copy(node, lambda n: self.fetch(n, EVERYTHING))
            if node.op == "placeholder":
                self.emit.know(self.new[node])

    def _narrow_shared_result(self, node: Node, call: Call) -> None:
        """One of several results, whose producer ran on more rows than this one is read on."""
        if call.target is not operator.getitem or node not in self.demands.calls:
            return
        need, held = call.args[0], self.demands.on(call.args[0].node)
        in_place = need.rows.selected is not None and need.node.target in RECURRENCES
        if held is EVERYTHING or in_place:
            self.new[node] = self._take(self.new[node], need.rows)
        elif isinstance(held, Rows) and not same_rows(held, need.rows):
            self.new[node] = self._slice(self.new[node], need.rows)

    def resolve(self, argument: Any, like: Node | None = None) -> Any:
        """A narrowed call's argument in the new graph. `like`: the node whose call it is."""
        if isinstance(argument, Call):
            args, kwargs = self.resolve(argument.args, like), self.resolve(argument.kwargs, like)
            return self.emit(argument.target, *args, like=like, **kwargs)
        if isinstance(argument, Need):
            return self.fetch(argument.node, argument.rows)
        if isinstance(argument, CausalTail):
            return causal_mask(self.emit, argument, self._index_with_last)
        if isinstance(argument, Node):
            return self.fetch(argument, EVERYTHING)
        if isinstance(argument, list | tuple):
            return type(argument)(self.resolve(item, like) for item in argument)
        if isinstance(argument, dict):
            return {name: self.resolve(item, like) for name, item in argument.items()}
        return argument

    def fetch(self, node: Node, wanted: Demand) -> Node:
        """The new node that holds the wanted rows of an old one: as computed, or a slice of more."""
        held = self.demands.on(node)
        if wanted is EVERYTHING:
            assert held is EVERYTHING
            return self.new[node]
        assert isinstance(wanted, Rows)
        if not isinstance(node.meta["val"], torch.Tensor) or covers(wanted, node.meta["val"]):
            return self.new[node]  # several results: each is sliced where it is read
        if isinstance(held, Rows) and same_rows(held, wanted):
            return self.new[node]
        call = narrowed_call(node, wanted)
        if call is not None and call.target is None and isinstance(call.args[0], Need):
            return self.fetch(call.args[0].node, call.args[0].rows)  # the rows come from one operand: read them there
        return self.some_rows(node, wanted)

    def some_rows(self, node: Node, wanted: Rows) -> Node:
        """The wanted rows of what is held of a node, which is more; once per graph."""
        selected = wanted.selected
        key = (
            node,
            wanted.dim,
            wanted.last,
            str(wanted.blocks),
            selected and (selected.index, selected.batch, selected.each),
        )
        if key not in self.slices:
            cut = self._slice if wanted.selected is None else self._take
            self.slices[key] = cut(self.new[node], wanted)
        return self.slices[key]

    def _take(self, value: Node, wanted: Rows) -> Node:
        """Wanted rows of a whole value."""
        selected = wanted.selected
        if selected is None:
            return self._slice(value, wanted)
        batch = wanted.dim if selected.batch == BLOCKS else selected.batch
        length = shape(value)[wanted.dim] // (wanted.blocks * selected.each)
        index = self._index_with_last(selected.index, length, wanted.last // selected.each)
        if batch == wanted.dim or selected.each != 1:
            return self.emit(take_entries, value, index, wanted.dim, selected.each, batch, like=value)
        return self.emit(take_rows, value, index, wanted.dim, batch, like=value)

    def _index_with_last(self, index: Node, length: IntLike, last: int) -> Node:
        """Positions of selected and last rows; once per graph."""
        key = ("index", index, str(length), last)
        if key not in self.emit.memo:
            new = self.fetch(index, EVERYTHING)
            self.emit.memo[key] = self.emit(with_last, new, self.emit.size(length), last)
        return self.emit.memo[key]

    def _slice(self, value: Node, wanted: Rows) -> Node:
        dim, blocks = wanted.dim, wanted.blocks
        if isinstance(blocks, int) and blocks == 1:
            return self.emit(aten.slice.Tensor, value, dim, -wanted.last, TO_THE_END, like=value)
        length = value.meta["val"].shape[dim] // blocks
        parts = [self.emit.size(blocks), -1] if not isinstance(blocks, torch.SymInt) else [-1, self.emit.size(length)]
        apart = self.emit(aten.unflatten.int, value, dim, parts, like=value)
        last = self.emit(aten.slice.Tensor, apart, dim + 1, -wanted.last, TO_THE_END, like=value)
        return self.emit(aten.flatten.using_ints, last, dim, dim + 1, like=value)


def keep_apart(before: Graph, emit: Emitter) -> None:
    """Copy results that would now lie in one memory and did not before: rows of two joins of the same value, say.

    Args:
        before: the graph as it was.
        emit: writes the graph as it is now, whose results are those of `before`, one by one.
    """
    end = emit.graph.output_node()
    first = next(node for node in emit.graph.nodes if node.op != "placeholder")
    seen: dict[Node, Node] = {}  # memory in the new graph -> memory in the old one
    old = iter([leaf for leaf in tree_leaves(before.output_node().args) if isinstance(leaf, Node)])

    def apart(new: Node) -> Node:
        held, memory = memory_of(next(old)), memory_of(new)
        borrowed = memory.op == "placeholder" and held.op != "placeholder"
        if seen.setdefault(memory, held) is held and not borrowed:
            return new
        # Right behind the value: what is written into it later is none of the result's.
        with emit.graph.inserting_before(first if new.op == "placeholder" else new.next):
            return emit(aten.clone.default, new, like=new)

    end.args = map_arg(end.args, apart)
