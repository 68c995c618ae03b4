"""Calls as row rules read and write them: arguments by name, operands that are needed only in part."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ridgefill_compile.passes.rows import IntLike, Rows, same

aten = torch.ops.aten
TO_THE_END = 2**63 - 1  # what `x[a:]` traces to
CAUSAL_TAIL = "ridgefill_causal_tail"  # meta key of an attention call with the mask of a `CausalTail`: (queries, rows)


class Need(NamedTuple):
    """An operand of which only `rows` are needed."""

    node: Node
    rows: Rows


class CausalTail(NamedTuple):
    """The mask of some queries of causal attention: query i sees keys 0..i (aligned at the top left)."""

    query: Node
    key: Node
    rows: Rows


@dataclass
class Call:
    """The narrowed computation. `target` None: the operand in `args[0]` is already the answer.

    An argument may be a call itself: what it gives is narrowed further.
    """

    target: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


Rule = Callable[[Node, Rows], Call | None]


def shape(node: Node) -> tuple[IntLike, ...]:
    """Shape of a node's (fake) value."""
    return tuple(node.meta["val"].shape)


def arguments(node: Node) -> dict[str, Any]:
    """A node's arguments by the name its schema gives them, defaults included."""
    bound: dict[str, Any] = {}
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if position < len(node.args) and not argument.kwarg_only:
            bound[argument.name] = node.args[position]
        elif argument.name in node.kwargs:
            bound[argument.name] = node.kwargs[argument.name]
        elif argument.has_default_value():
            bound[argument.name] = argument.default_value
    return bound


def rewrite(node: Node, **changes: Any) -> Call:
    """The node's own call with some arguments changed by name."""
    given = arguments(node)
    given.update(changes)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in node.target._schema.arguments:  # type: ignore[union-attr]
        if argument.kwarg_only:
            default = argument.default_value if argument.has_default_value() else None
            if argument.name in given and (given[argument.name] is not default or argument.name in node.kwargs):
                kwargs[argument.name] = given[argument.name]
        elif argument.name in given:
            args.append(given[argument.name])
    return Call(node.target, tuple(args), kwargs)


def broadcast(operand: Any, rows: Rows, result: Sequence[IntLike]) -> Any:
    """An operand of a broadcasting op: `Need` where it has these rows, plain where it is spread over them.

    Raises:
        LookupError: it cannot be told which, for symbolic sizes.
    """
    if not isinstance(operand, Node) or not isinstance(operand.meta.get("val"), torch.Tensor):
        return operand
    size = shape(operand)
    dim = rows.dim - (len(result) - len(size))
    if dim < 0 or (same(size[dim], 1) and not same(result[rows.dim], 1)):
        return operand
    if same(size[dim], result[rows.dim]):
        return Need(operand, rows.at(dim))
    raise LookupError


def positive(dim: int, rank: int) -> int:
    """A dimension counted from 0."""
    return dim + rank if dim < 0 else dim


def count(rows: Rows) -> int | Call | None:
    """How many entries the rows are, as an argument: a plain number, or the call that computes it from an index."""
    number = rows.length * rows.blocks
    if isinstance(number, int):
        return number
    if rows.selected is None or not same(rows.blocks, 1):
        return None
    index = rows.selected.index
    positions = Call(aten.sym_size.int, (index, len(shape(index)) - 1))
    entries = positions if rows.selected.each == 1 else Call(operator.mul, (positions, rows.selected.each))
    return Call(operator.add, (entries, rows.last))


def first_operand(node: Node, rows: Rows) -> Call:
    """The first operand is narrowed (on `rows.dim`, a dimension of the operand), the others are settings."""
    operand = node.args[0]
    assert isinstance(operand, Node)
    return Call(node.target, (Need(operand, rows), *node.args[1:]), dict(node.kwargs))


def reads(argument: object) -> Iterator[tuple[Node, Rows | None]]:
    """The operands in a call's arguments, with the rows that are needed of them; None: all."""
    if isinstance(argument, Need):
        spread = argument.rows.selected is not None and argument.rows.selected.spread
        yield argument.node, None if spread else argument.rows
    elif isinstance(argument, Node):
        yield argument, None
    elif isinstance(argument, Call):
        yield from reads([*argument.args, *argument.kwargs.values()])
    elif isinstance(argument, CausalTail):  # a mask of positions: it reads sizes, and which rows are selected
        if argument.rows.selected is not None:
            yield argument.rows.selected.index, None
    elif isinstance(argument, list | tuple):
        for item in argument:
            yield from reads(item)


def needs(argument: object) -> Iterator[Need]:
    """Of these, the ones that are needed in part."""
    return (Need(node, rows) for node, rows in reads(argument) if rows is not None)
