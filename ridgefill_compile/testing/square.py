"""The commuting square of one call: its last rows, against the narrowed call on operands that are really narrower.

        x  ----- op ----->  op(x)
        |                     |
      rows                  rows
        v                     v
      x[rows] --- call --->  same?

Values without entries serve the rule: fake ones, as in a captured graph, where sizes are symbolic, and otherwise
tensors on the meta device, which take no time. Real values beside them serve the truth. A narrowed operand is cut out
of the real one before the call runs, so a rule that reads further cannot pass.

The rows are the last ones, or those and some before them that are selected: the same ones of every sequence, or of each
its own, for every dimension that may count sequences.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate, map_arg

from ridgefill_compile.passes.calls import Call, CausalTail, Need, Rule
from ridgefill_compile.passes.rows import BLOCKS, IntLike, Rows, Selected
from ridgefill_compile.passes.rules import narrowed_call
from ridgefill_compile.recurrences.table import RECURRENCES
from ridgefill_compile.testing.graphs import aten, fake, fake_mode

UNSET = (aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default)  # only their shapes can be compared


@dataclass(frozen=True)
class Size:
    """In a sample's arguments: the size of dimension `dim` of its `operand`-th tensor, as a node of the graph."""

    operand: int
    dim: int


@dataclass(frozen=True)
class Sample:
    """One call of an op on real tensors; `dynamic`: pairs of tensor and dimension whose size is symbolic."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    dynamic: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        def short(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            kind = str(value.dtype).removeprefix("torch.")
            return f"{kind}{list(value.shape)}{'' if value.is_contiguous() else ' strided'}"

        args = [str(map_aggregate(a, short)) for a in self.args]
        args += [f"{name}={map_aggregate(a, short)}" for name, a in self.kwargs.items()]
        return f"{self.op}({', '.join(args)}){f' dynamic {self.dynamic}' if self.dynamic else ''}"


def sample(op: Any, *args: Any, dynamic: Sequence[tuple[int, int]] = (), **kwargs: Any) -> Sample:
    """A `Sample`, written as the call."""
    return Sample(op, args, kwargs, tuple(dynamic))


@dataclass(frozen=True)
class Finding:
    """What one rule said of some rows of one result of one sample.

    Attributes:
        verdict: "right", "wrong", or "none" where the rule returned None.
        operands: of a right one: whether it narrowed any.
        detail: of a wrong one: what was wrong; of "none": a narrowing that would have been right, if one was found.
    """

    sample: Sample
    result: int | None
    rows: Rows
    size: tuple[int, ...]
    verdict: str
    detail: str = ""

    def __str__(self) -> str:
        which = "" if self.result is None else f"[{self.result}]"
        return f"{self.sample}{which} -> {list(self.size)}, {self.rows}: {self.verdict} {self.detail}"


class NoRule(Exception):
    """No rule narrows the call."""


class Wrong(Exception):
    """A rule asks for rows that are not there."""


def number(value: Any) -> int:
    """A size, or the one it was traced with. Adds no guard."""
    return int(value.node.hint) if isinstance(value, torch.SymInt) else int(value)


def take(value: torch.Tensor, rows: Rows, index: torch.Tensor | None = None) -> torch.Tensor:
    """The rows of a real tensor, as a slice of it. `index`: the positions of selected ones."""
    blocks = number(rows.blocks)
    if not 0 <= rows.dim < value.dim():
        raise Wrong(f"{rows} of a value of shape {list(value.shape)}")
    length, rest = divmod(value.shape[rows.dim], blocks)
    if rest or rows.last > length:
        raise Wrong(f"{rows} of a value of shape {list(value.shape)}")
    if rows.selected is not None:
        assert index is not None
        return _take_selected(value, rows, rows.selected, index)
    if blocks == 1:
        return value.narrow(rows.dim, length - rows.last, rows.last)
    apart: torch.Tensor = value.unflatten(rows.dim, (blocks, length))
    apart = apart.narrow(rows.dim + 1, length - rows.last, rows.last)
    return apart.flatten(rows.dim, rows.dim + 1)


def _take_selected(value: torch.Tensor, rows: Rows, selected: Selected, index: torch.Tensor) -> torch.Tensor:
    """Selected and last rows, sequence by sequence and entry by entry."""
    blocks, dim, batch = number(rows.blocks), rows.dim, selected.batch
    length = value.shape[dim] // blocks

    def entries(positions: torch.Tensor) -> torch.Tensor:
        chosen = [position * selected.each + i for position in positions.tolist() for i in range(selected.each)]
        if any(entry >= length - rows.last for entry in chosen):
            raise Wrong(f"{rows} of a value of shape {list(value.shape)}")
        return torch.tensor([*chosen, *range(length - rows.last, length)])

    if batch == BLOCKS and blocks == len(index) and index.dim() == 2:
        return value.index_select(dim, torch.cat([entries(own) + i * length for i, own in enumerate(index)]))
    if blocks == 1 and batch is None and index.dim() == 1:
        return value.index_select(dim, entries(index))
    if blocks != 1 or not isinstance(batch, int) or index.dim() != 2:
        raise Wrong(f"{rows}, in sequences {batch}, at positions {list(index.shape)}")
    while batch < 0:
        value, dim, batch = value.unsqueeze(0), dim + 1, batch + 1
    if selected.spread:
        value = value.expand([*value.shape[:batch], len(index), *value.shape[batch + 1 :]])
    if value.shape[batch] != len(index):
        raise Wrong(f"{rows}, of {len(index)} sequences, of a value of shape {list(value.shape)}")
    alone = zip(value.unbind(batch), index, strict=True)
    return torch.stack([one.index_select(dim - (dim > batch), entries(own)) for one, own in alone], batch)


def empty(value: Any) -> Any:
    """A tensor without entries: size, strides and type."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


class Square:
    """One sample as a graph of one call, with a real value beside every node. `rule`: in place of the table's."""

    def __init__(self, given: Sample, rule: Rule | None = None) -> None:
        self.sample, self.rule = given, rule
        self.mode = fake_mode()
        self.graph = Graph()
        self.real: dict[Node, Any] = {}
        self.tensors: list[Node] = []
        args = map_aggregate(given.args, self._place)
        kwargs = {name: map_aggregate(value, self._place) for name, value in given.kwargs.items()}
        args, kwargs = map_aggregate((args, kwargs), self._resolve)
        self.call = self._add(given.op, args, kwargs)
        several = isinstance(self.real[self.call], list | tuple)
        self.results: dict[int | None, Node] = {None: self.call}
        if several:
            indices = range(len(self.real[self.call]))
            self.results = {i: self._add(operator.getitem, (self.call, i), {}) for i in indices}

    def _place(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        position = len(self.tensors)
        node = self.graph.placeholder(f"input_{position}")
        dims = [dim for operand, dim in self.sample.dynamic if operand == position]
        node.meta["val"] = fake(self.mode, value, node.name, dims) if self.sample.dynamic else empty(value)
        self.real[node] = value
        self.tensors.append(node)
        return node

    def _resolve(self, value: Any) -> Any:
        if not isinstance(value, Size):
            return value
        return self._add(aten.sym_size.int, (self.tensors[value.operand], value.dim), {})

    def _add(self, target: Any, args: Any, kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        reals = map_arg((args, kwargs), lambda n: self.real[n])
        self.real[node] = target(*reals[0], **reals[1])
        if not self.sample.dynamic:
            node.meta["val"] = map_aggregate(self.real[node], empty)
            return node
        fakes = map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode, torch.no_grad():
            node.meta["val"] = target(*fakes[0], **fakes[1])
        return node

    def narrowed(self, node: Node, rows: Rows, whole: bool = False) -> Any:
        """These rows of a node: cut out of an input, or as its rule computes them from narrower operands.

        Args:
            node: one of this graph.
            rows: of its value.
            whole: copy what is cut out, so that it is contiguous.

        Raises:
            NoRule: the rule returns None.
            Wrong: it asks for rows that an operand does not have.
        """
        if node.op == "placeholder" or (rows.selected is not None and rows.selected.spread):
            cut = take(self.real[node], rows, self._index_of(rows))
            return cut.contiguous() if whole else cut
        call = self.narrowed_call(node, rows)
        if call is None:
            raise NoRule
        args = self._given(call.args, whole)
        kwargs = self._given(call.kwargs, whole)
        value = args[0] if call.target is None else call.target(*args, **kwargs)
        if node is not self.call and rows.selected is not None and self.call.target in RECURRENCES:
            value = take(value, rows, self._index_of(rows))  # a scan gives selected rows in their places
        return value

    def narrowed_call(self, node: Node, rows: Rows) -> Call | None:
        """What the rule says."""
        return narrowed_call(node, rows, self.rule if node is self.call else None)

    def _index_of(self, rows: Rows) -> Any:
        return None if rows.selected is None else self.real[rows.selected.index]

    def _given(self, argument: Any, whole: bool) -> Any:
        """A narrowed call's argument, as real values."""
        if isinstance(argument, Need):
            return self.narrowed(argument.node, argument.rows, whole)
        if isinstance(argument, Call):
            return argument.target(*self._given(argument.args, whole), **self._given(argument.kwargs, whole))
        if isinstance(argument, CausalTail):
            return causal_tail(
                self.real[argument.query], self.real[argument.key], argument.rows, self._index_of(argument.rows)
            )
        if isinstance(argument, Node):
            return self.real[argument]
        if isinstance(argument, list | tuple):
            return [self._given(item, whole) for item in argument]
        if isinstance(argument, dict):
            return {name: self._given(item, whole) for name, item in argument.items()}
        return argument

    def judge(self, result: int | None, rows: Rows, gaps: bool = True) -> Finding:
        """Ask the rule for these rows of a result, and hold it to the truth. `gaps`: search for one if it is silent."""
        node = self.results[result]
        size = tuple(self.real[node].shape)
        expected = take(self.real[node], rows, self._index_of(rows))
        assert self.mode.shape_env is not None
        guards = len(self.mode.shape_env.guards)
        try:
            for whole in (False, True) if rows.selected is None else (False,):
                self.compare(self.narrowed(node, rows, whole), expected)
        except NoRule:
            all_rows = rows.last * number(rows.blocks) == size[rows.dim]
            gap = self.search(result, rows, expected) if gaps and not all_rows and rows.selected is None else None
            return Finding(self.sample, result, rows, size, "none", gap or "")
        except Exception as error:
            return Finding(self.sample, result, rows, size, "wrong", f"{type(error).__name__}: {error}")
        if len(self.mode.shape_env.guards) != guards:
            return Finding(self.sample, result, rows, size, "wrong", "the rule added a guard on a symbolic size")
        return Finding(self.sample, result, rows, size, "right")

    def compare(self, actual: Any, expected: torch.Tensor) -> None:
        """Same shape, dtype and entries."""
        if self.sample.op in UNSET:
            actual, expected = torch.zeros_like(actual), torch.zeros_like(expected)
        alike = actual.shape == expected.shape and actual.dtype == expected.dtype
        if not alike or not torch.allclose(actual, expected, rtol=1e-5, atol=1e-6, equal_nan=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, equal_nan=True)  # says where

    def search(self, result: int | None, rows: Rows, expected: torch.Tensor) -> str | None:
        """A narrowing of aligned operands under which the call would commute: what a rule could have said."""
        length = self.real[self.results[result]].shape[rows.dim] // number(rows.blocks)
        aligned = [[None, *self._aligned(node, length, rows.last)] for node in self.tensors]
        for choice in itertools.product(*aligned):
            cut = dict(zip(self.tensors, choice, strict=True))
            if any(choice) and any(self._commutes(args, cut, result, expected) for args in self._sizes(rows)):
                return ", ".join(f"{node}: {part}" for node, part in cut.items() if part is not None)
        if not self.tensors and any(self._commutes(args, {}, result, expected) for args in self._sizes(rows)):
            return "a smaller size"
        for node in self.tensors:
            size = self.real[node].shape
            if rows.dim < len(size):
                for part in self._aligned(node, size[rows.dim], rows.last):
                    if self._equal(take(self.real[node], part), expected):
                        return f"{part} of {node} itself"
        return None

    def _aligned(self, node: Node, length: int, last: int) -> Iterator[Rows]:
        for dim, size in enumerate(self.real[node].shape):
            if length > 0 and size % length == 0 and size >= length > last:
                yield Rows(dim, last, size // length)

    def _sizes(self, rows: Rows) -> Iterator[tuple[Any, ...]]:
        """The call's arguments, as they are and with a size made smaller."""
        args = self.call.args
        yield args
        for position, value in enumerate(args):
            if isinstance(value, list | tuple) and rows.dim < len(value) and not set(self.tensors) & set(value):
                for smaller in (-1, rows.last * number(rows.blocks)):
                    sizes = [*value[: rows.dim], smaller, *value[rows.dim + 1 :]]
                    yield (*args[:position], sizes, *args[position + 1 :])

    def _commutes(self, args: Any, cut: dict[Node, Rows | None], result: int | None, expected: torch.Tensor) -> bool:
        def real(node: Node) -> Any:
            rows = cut.get(node)
            return self.real[node] if rows is None else take(self.real[node], rows)

        try:
            args, kwargs = map_arg((args, self.call.kwargs), real)
            value = self.sample.op(*args, **kwargs)
            value = value if result is None else value[result]
        except (RuntimeError, IndexError, ValueError):
            return False
        return self._equal(value, expected)

    def _equal(self, actual: torch.Tensor, expected: torch.Tensor) -> bool:
        try:
            self.compare(actual, expected)
        except AssertionError:
            return False
        return True

    def demands(self, result: int | None) -> Iterator[Rows]:
        """Rows to ask a result for: one, two, all but one and all, in one block or several; and selected ones."""
        sizes = [size for node in self.tensors for size in node.meta["val"].shape if isinstance(size, torch.SymInt)]
        counts: list[IntLike] = [1, 2, 3, *sizes]
        for dim, length in enumerate(self.real[self.results[result]].shape):
            for blocks in counts:
                inner, rest = divmod(length, number(blocks))
                lasts = sorted({1, 2, inner - 1, inner}) if not rest else []
                yield from (Rows(dim, last, blocks) for last in lasts if 1 <= last <= inner)
            yield from self._selections(result, dim, [2, *sizes])

    def _selections(self, result: int | None, dim: int, counts: Sequence[IntLike]) -> Iterator[Rows]:
        """Every third row of one dimension and the last: the same ones of all that the other dimensions count, of each
        its own, and of each block; alone, and in pairs.
        """
        node = self.results[result]
        length, rank = node.meta["val"].shape[dim], self.real[node].dim()
        batches: list[tuple[int | str | None, IntLike]] = [(None, 1), *((BLOCKS, blocks) for blocks in counts)]
        batches += [(batch, 1) for batch in range(rank) if batch != dim]
        for (batch, blocks), each in itertools.product(batches, (1, 2)):
            positions, rest = divmod(number(length), number(blocks) * each)
            if rest or positions < 3:
                continue
            sequences = number(blocks) if batch == BLOCKS else self.real[node].shape[batch] if batch is not None else 0
            index = self._add_index(positions, sequences)
            count = length // (blocks * each) // 3
            yield Rows(dim, each, blocks, Selected(index, count, batch, each))

    def _add_index(self, positions: int, sequences: int) -> Node:
        """Positions of every third row before the last: [count], or [sequences, count]."""
        generator = torch.Generator().manual_seed(positions)
        own = [torch.randperm(positions - 1, generator=generator)[: positions // 3] for _ in range(sequences or 1)]
        value = torch.stack(own).sort(-1).values
        node = self.graph.placeholder(f"rows_{len(self.graph.nodes)}")
        self.real[node] = value if sequences else value[0]
        node.meta["val"] = self.real[node]
        return node


def causal_tail(query: torch.Tensor, key: torch.Tensor, rows: Rows, index: torch.Tensor | None = None) -> torch.Tensor:
    """These rows of the mask that `is_causal` stands for, bool [rows, keys], or [sequences, 1, rows, keys]."""
    mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    selected = rows.selected
    if selected is not None and selected.each != 1:
        raise Wrong("a mask of queries of which several stand for one position")
    if selected is None or selected.batch is None:
        return take(mask, rows.at(0), index)
    return take(mask[None, None], replace(rows, dim=2, selected=replace(selected, batch=0, spread=True)), index)


def judge(given: Sample, gaps: bool = True, rule: Rule | None = None) -> Iterator[Finding]:
    """Every demand on every result of a sample. `gaps`: search where the rule is silent; `rule`: not the table's."""
    square = Square(given, rule)
    for result, node in square.results.items():
        if isinstance(square.real[node], torch.Tensor):
            for rows in square.demands(result):
                yield square.judge(result, rows, gaps)
