"""Where attention is: one fused call, or a product, a softmax and a second product. Changes nothing.

    attention(query, key, value, mask)
    matmul(query, key') -> scale, mask, join sinks, ... -> softmax -> cut sinks, ... -> matmul(weights, value)

Which of the two a layer has is told by its nodes alone; a layer may also hold several, or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch.fx import Node

from ridgefill_compile.passes.arithmetic_rules import attention, convolution, einsum, linear, matmul
from ridgefill_compile.passes.calls import arguments, aten, shape
from ridgefill_compile.passes.layout_rules import embedding
from ridgefill_compile.passes.rows import IntLike, plain, same
from ridgefill_compile.passes.rules import rule_for

ATTENTION = aten.scaled_dot_product_attention.default
SOFTMAX = (aten.softmax.int, aten._softmax.default)
FACTORS = {
    aten.matmul.default: ("self", "other"),
    aten.bmm.default: ("self", "mat2"),
    aten.baddbmm.default: ("batch1", "batch2"),
}
MIXING = (linear, matmul, einsum, attention, convolution, embedding)  # no path of attention weights goes through them


@dataclass(frozen=True)
class SpelledOut:
    """Attention of all prompt rows that a model computes itself.

    Attributes:
        weights: the softmax, [batch, heads, rows, columns].
        keys: what the queries are multiplied by, [.., head size, keys].
        sinks: columns behind the keys that take attention and give nothing.
    """

    weights: Node
    keys: Node
    sinks: int


def spelled_out(nodes: Iterable[Node], rows: IntLike) -> Iterator[SpelledOut]:
    """Attention of `rows` queries among some nodes, each softmax once."""
    found: set[Node] = set()
    for node in nodes:
        if node.target not in FACTORS or (weights := softmax_of(node)) is None or weights in found:
            continue
        size = shape(weights)
        sinks = plain(size[-1] - shape(node)[-1])
        if len(size) == 4 and same(size[-2], rows) and sinks is not None and sinks >= 0:
            keys = arguments(node)[FACTORS[node.target][1]]
            assert isinstance(keys, Node)
            found.add(weights)
            yield SpelledOut(weights, keys, sinks)


def comes_from_softmax(value: object) -> bool:
    """Whether a factor holds attention weights: a softmax's result, cast, laid out, scaled, ..."""
    while isinstance(value, Node) and value.op == "call_function" and not _mixes(value):
        if value.target in SOFTMAX:
            return True
        value = next(iter(value.all_input_nodes), None)
    return False


def softmax_of(product: Node) -> Node | None:
    """The softmax that a product's scores go into, if they do."""
    seen, ahead = {product}, [product]
    while ahead:
        for reader in ahead.pop().users:
            if reader.target in SOFTMAX:
                return reader
            if reader not in seen and not _mixes(reader):
                seen.add(reader)
                ahead.append(reader)
    return None


def _mixes(node: Node) -> bool:
    return rule_for(node) in MIXING
