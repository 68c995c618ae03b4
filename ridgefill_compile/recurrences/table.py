"""What passes need to know of each recurrence: which operands only the outputs read, and what a scan computes.

A rule that narrows a recurrence to its last rows narrows the `query_side` operands and nothing else: every other
operand is read whole, by the state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import sympy
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

from ridgefill_compile.passes.calls import arguments, shape
from ridgefill_compile.recurrences import (  # noqa: F401  (they register their operators)
    delta_rule,
    linear_attention,
    linear_recurrence,
    mlstm,
    selective_scan,
    wkv,
)
from ridgefill_compile.recurrences.tiles import TILE


@dataclass(frozen=True)
class Recurrence:
    """One operator. It returns (outputs, final state), or a final state in several parts.

    Attributes:
        op: the operator.
        row_dim: dimension of rows in the outputs and in the query side.
        query_side: names of the operands that only outputs read. They may have fewer rows than the others: the last
            ones, and as many outputs come out.
        outputs: name of the argument that says how many last rows to put out (-1: all), where there is no query side.
        multiply_adds: multiply-adds of a call (of a node with fake values), with or without outputs of all rows.
        log_decay: name of the logarithms of the decay [batch, rows, heads, ..], where the state is a matrix a head,
            [batch, heads, key, value], operands with rows have them in dimension 1, and `query` is the query side.
    """

    op: OpOverload
    row_dim: int
    query_side: tuple[str, ...]
    outputs: str | None
    multiply_adds: Callable[[Node], sympy.Expr]
    log_decay: str | None = None


def _sizes(operand: Node | Tensor) -> list[sympy.Expr]:
    sizes = operand.shape if isinstance(operand, Tensor) else shape(operand)
    return [sympy.Integer(size) if isinstance(size, int) else size.node.expr for size in sizes]


def _gated_delta_rule(node: Node) -> sympy.Expr:
    """Per row and head: products with rows of the tile, the tile's inverse, and three products with the state."""
    given = arguments(node)
    batch, rows, key_heads, key_dim = _sizes(given["key"])
    heads, value_dim = _sizes(given["value"])[2:]
    wanted = _sizes(given["query"])[1]
    with_state = heads * key_dim * value_dim
    within = heads * TILE * value_dim
    if len(_sizes(given["g"])) == 4:
        pairs = heads * key_dim * sympy.Rational(TILE + 1, 2)  # those with j <= i alone
    else:
        pairs = key_heads * key_dim * TILE
    inverse = heads * sympy.Rational(TILE**2, 3)
    for_state = pairs + inverse + within + 2 * with_state
    for_outputs = pairs + within + with_state
    return batch * (rows * for_state + wanted * for_outputs)


def _linear_attention(node: Node) -> sympy.Expr:
    given = arguments(node)
    batch, rows, groups, key_dim = _sizes(given["key"])
    heads, value_dim = _sizes(given["value"])[2:]
    wanted = _sizes(given["query"])[1]
    with_state = heads * key_dim * value_dim
    within = TILE * (groups * key_dim + heads * value_dim)
    return batch * (rows * with_state + wanted * (with_state + within))


def _mlstm(node: Node) -> sympy.Expr:
    """Linear attention of values with a one behind them, each head with a key of its own."""
    given = arguments(node)
    batch, rows, heads, key_dim = _sizes(given["key"])
    value_dim = _sizes(given["value"])[3] + 1
    wanted = _sizes(given["query"])[1]
    return batch * heads * (rows * key_dim * value_dim + wanted * (key_dim * value_dim + TILE * (key_dim + value_dim)))


def _selective_scan(node: Node) -> sympy.Expr:
    """Elementwise work, which is all there is: two multiplications to add to an entry of the state, one to read it."""
    given = arguments(node)
    batch, channels, rows = _sizes(given["x"])
    wanted = _sizes(given["C"])[2]
    return batch * channels * _sizes(given["A"])[1] * (2 * rows + wanted)


def _wkv(node: Node) -> sympy.Expr:
    """Elementwise work: both sums, and both again with the bonus."""
    given = arguments(node)
    batch, rows, channels = _sizes(given["key"])
    wanted = _sizes(node.meta["val"][0])[1]
    return batch * channels * 2 * (rows + wanted)


def _linear_recurrence(node: Node) -> sympy.Expr:
    return sympy.Mul(*_sizes(arguments(node)["x"]))


_ops = torch.ops.ridgefill

RECURRENCES: dict[OpOverload, Recurrence] = {
    recurrence.op: recurrence
    for recurrence in [
        Recurrence(_ops.gated_delta_rule.default, 1, ("query",), None, _gated_delta_rule, "g"),
        Recurrence(_ops.linear_attention.default, 1, ("query",), None, _linear_attention, "g"),
        Recurrence(_ops.linear_recurrence.default, 1, (), "outputs", _linear_recurrence),
        Recurrence(_ops.mlstm.default, 1, ("query",), None, _mlstm),
        Recurrence(_ops.selective_scan.default, 2, ("C",), None, _selective_scan),
        Recurrence(_ops.wkv.default, 1, (), "outputs", _wkv),
    ]
}
