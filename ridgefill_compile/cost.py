"""Multiply-adds of a captured graph, as a formula in its symbolic sizes, and the speed-up they allow.

Counted: matrix products, convolutions, and attention over the pairs of query and key that its mask leaves when it is
causal (what a fused kernel computes). Elementwise work and softmax are not.

The ceiling is `exact / filled`: what the filled graph would gain if time were multiply-adds. The simpler one counts
layers passed: with split S of L layers and tail T of N rows, `1 / (S/L + (1 - S/L) T/N)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from ridgefill_compile.passes.calls import CAUSAL_TAIL, arguments, aten, shape
from ridgefill_compile.passes.experts import Region
from ridgefill_compile.passes.rows import Rows
from ridgefill_compile.passes.shuffled import GROUPED_PRODUCTS
from ridgefill_compile.recurrences.table import RECURRENCES


def expression(size: int | torch.SymInt) -> sympy.Expr:
    """A size as a sympy expression."""
    return sympy.Integer(size) if isinstance(size, int) else size.node.expr


def multiply_adds(graph: Graph) -> sympy.Expr:
    """Multiply-adds of one run of a graph with fake values."""
    total = sympy.Integer(0)
    for node in graph.nodes:
        counter = counter_of(node)
        if counter is not None:
            total += counter(node)
    return sympy.expand(total)


def counter_of(node: Node) -> Callable[[Node], sympy.Expr] | None:
    """What counts a node's multiply-adds; None for a node that is not counted."""
    if node.op != "call_function":
        return None
    if isinstance(node.target, Region):
        return _region
    if node.target in RECURRENCES:
        return RECURRENCES[node.target].multiply_adds
    if str(node.target) in GROUPED_PRODUCTS:
        return _grouped_product
    return COUNTERS.get(node.target)


def values_of_sizes(graph: Graph) -> dict[sympy.Symbol, int]:
    """What each symbolic size was when the graph was traced."""
    hints: dict[sympy.Symbol, int] = {}
    for node in graph.nodes:
        if node.op != "placeholder":
            continue
        value = node.meta.get("val")
        sizes = value.shape if isinstance(value, torch.Tensor) else [value]
        for size in sizes:
            if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                hints[size.node.expr] = int(size.node.hint)
    return hints


def layer_pass_ceiling(split: int, layers: int, rows: int, tail: int) -> float:
    """`1 / r`, `r = S/L + (1 - S/L) T/N`: the speed-up if every layer cost the same and a filled row cost nothing."""
    share = split / layers
    return 1.0 / (share + (1.0 - share) * min(1.0, tail / rows))


def _product(sizes: Sequence[int | torch.SymInt]) -> sympy.Expr:
    return sympy.Mul(*map(expression, sizes))


def _matrix_product(name: str) -> Callable[[Node], sympy.Expr]:
    """Result's elements times the inner size, which is the last of the named operand."""

    def count(node: Node) -> sympy.Expr:
        return _product(shape(node)) * expression(shape(arguments(node)[name])[-1])

    return count


def _region(node: Node) -> sympy.Expr:
    assert isinstance(node.target, Region)
    return multiply_adds(node.target.alone(node))


def _grouped_product(node: Node) -> sympy.Expr:
    """Each entry meets the matrix of its group."""
    entries = node.args[0]
    assert isinstance(entries, Node)
    return _product(shape(node)) * expression(shape(entries)[-1])


def _attention(node: Node) -> sympy.Expr:
    given = arguments(node)
    query, key, value = (shape(given[name]) for name in ("query", "key", "value"))
    queries, keys = expression(query[-2]), expression(key[-2])
    pairs = queries * keys
    if CAUSAL_TAIL in node.meta:
        pairs = _tail_pairs(*node.meta[CAUSAL_TAIL])
    elif given.get("is_causal", False):
        pairs = queries * (queries + 1) / 2
    return _product(query[:-2]) * pairs * (expression(query[-1]) + expression(value[-1]))


def _tail_pairs(queries: int | torch.SymInt, rows: Rows) -> sympy.Expr:
    """Pairs of query and key of some queries of causal attention; selected ones as if spread evenly over the prefix."""
    last, total = rows.last, expression(queries)
    pairs = last * total - sympy.Integer(last * (last - 1) // 2)
    if rows.selected is not None:
        pairs += expression(rows.selected.count) * (total - last + 1) / 2
    return pairs


def _einsum(node: Node) -> sympy.Expr:
    given = arguments(node)
    sizes: dict[str, int | torch.SymInt] = {}
    inputs = given["equation"].replace(" ", "").split("->")[0].split(",")
    for letters, operand in zip(inputs, given["tensors"], strict=True):
        sizes.update(zip(letters, shape(operand), strict=False))
    return _product(list(sizes.values()))


def _convolution(node: Node) -> sympy.Expr:
    return _product(shape(node)) * _product(shape(arguments(node)["weight"])[1:])


COUNTERS: dict[Any, Callable[[Node], sympy.Expr]] = {
    aten.linear.default: _matrix_product("input"),
    aten.matmul.default: _matrix_product("self"),
    aten.mm.default: _matrix_product("self"),
    aten.bmm.default: _matrix_product("self"),
    aten.addmm.default: _matrix_product("mat1"),
    aten.baddbmm.default: _matrix_product("batch1"),
    aten.einsum.default: _einsum,
    aten.scaled_dot_product_attention.default: _attention,
    aten.conv1d.default: _convolution,
}
