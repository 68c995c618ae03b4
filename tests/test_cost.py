"""Multiply-adds counted on graphs equal a closed form, written from what a layer is and not from the code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from ridgefill_compile.cost import COUNTERS, layer_pass_ceiling, multiply_adds, values_of_sizes
from ridgefill_compile.passes.eliminate import eliminate
from ridgefill_compile.passes.locate import locate
from ridgefill_compile.passes.route import Fill, route
from ridgefill_compile.testing.variants import RandomMaps
from tests.decoders import FILLED, LAYERS, VOCABULARY, token_ids
from tests.passes.graphs import aten, traced, traced_decoder

D, HEADS, INNER, KEPT = 64, 4, 96, 2


class Closed:
    """The closed form of a pre-norm decoder with a gated MLP.

    Per layer and row: q and o are D x H h, k and v are D x K h each, the MLP is 3 D x I. Attention multiplies queries
    with keys and weights with values, 2 h per head for each pair of query and key that is not masked out.
    """

    def __init__(self, kv_heads: int, head_dim: int, spelt: bool = False) -> None:
        self.query = self.output = D * HEADS * head_dim
        self.keys_and_values = 2 * D * kv_heads * head_dim
        self.mlp = 3 * D * INNER
        self.pair = 2 * head_dim * HEADS
        self.spelt = spelt  # attention from single ops computes the pairs it masks, too

    def pairs(self, rows: int, first: int = 0) -> int:
        """Pairs of queries first..rows-1 with their keys."""
        return sum(rows if self.spelt else row + 1 for row in range(first, rows))

    def layer(self, rows: int) -> int:
        """Everything on every row."""
        everything = self.query + self.keys_and_values + self.output + self.mlp
        return rows * everything + self.pair * self.pairs(rows)

    def late(self, rows: int, tail: int) -> int:
        """Keys and values on every row, the rest on the tail."""
        rest = self.query + self.output + self.mlp
        return rows * self.keys_and_values + tail * rest + self.pair * self.pairs(rows, rows - tail)

    def exact(self, batch: int, rows: int) -> int:
        return batch * (LAYERS * self.layer(rows) + KEPT * D * VOCABULARY)

    def filled(self, batch: int, rows: int, tail: int, split: int, maps: bool = True) -> int:
        late = LAYERS - split
        mapped = (late - 1) * (rows - tail) * D * D if maps else 0
        # Behind the last layer's keys and values, only the rows whose logits are wanted are read.
        layers = split * self.layer(rows) + (late - 1) * self.late(rows, tail) + self.late(rows, KEPT)
        return batch * (layers + mapped + KEPT * D * VOCABULARY)


FORMS = {
    "llama": Closed(kv_heads=2, head_dim=16),
    "llama_mha": Closed(kv_heads=4, head_dim=16),
    "llama_mqa": Closed(kv_heads=1, head_dim=16),
    "qwen3": Closed(kv_heads=2, head_dim=24),
    "olmo2": Closed(kv_heads=2, head_dim=16),
    "llama_eager": Closed(kv_heads=2, head_dim=16, spelt=True),
}


@functools.cache
def graph(name: str, batch: int, rows: int, dynamic: bool = False) -> tuple[GraphModule, list[Any]]:
    ids = token_ids(rows, batch=batch)
    return traced_decoder(FILLED[name].build(), ids, dynamic=dynamic, logits_to_keep=KEPT)


def fill(module: GraphModule, tail: int, split: int, way: str = "ridge") -> GraphModule:
    located = locate(module.graph)
    return eliminate(route(module, located, Fill(way, split, tail, RandomMaps(located, split))))


def at(module: GraphModule, batch: int, rows: int) -> int:
    """The formula of a dynamic graph, at sizes."""
    ids = next(node.meta["val"] for node in module.graph.nodes if node.meta["val"].__class__ is not torch.SymInt)
    sizes = dict(zip((size.node.expr for size in ids.shape), (batch, rows), strict=True))
    return int(multiply_adds(module.graph).subs(sizes))


@pytest.mark.parametrize("name", FORMS)
def test_decoder_exact_and_filled(name: str) -> None:
    form = FORMS[name]
    module, _ = graph(name, 2, 40)
    assert multiply_adds(module.graph) == form.exact(2, 40)
    for tail, split in ((8, 1), (3, 2), (39, 3), (20, 0)):
        assert multiply_adds(fill(module, tail, split).graph) == form.filled(2, 40, tail, split)
    assert multiply_adds(fill(module, 8, 1, "identity").graph) == form.filled(2, 40, 8, 1, maps=False)


@pytest.mark.parametrize("name", ["llama", "qwen3", "llama_eager"])
def test_formula_holds_at_any_length_and_batch(name: str) -> None:
    form = FORMS[name]
    module, _ = graph(name, 3, 43, dynamic=True)
    filled = {(tail, split): fill(module, tail, split) for tail, split in ((8, 1), (16, 2))}
    for batch, rows in ((3, 43), (1, 64), (2, 100), (5, 1000)):
        assert at(module, batch, rows) == form.exact(batch, rows)
        for (tail, split), after in filled.items():
            assert at(after, batch, rows) == form.filled(batch, rows, tail, split)


def test_formula_is_that_of_the_static_graph() -> None:
    symbolic, _ = graph("llama", 3, 43, dynamic=True)
    static, _ = graph("llama", 2, 40)
    assert at(symbolic, 2, 40) == multiply_adds(static.graph)
    assert at(fill(symbolic, 8, 1), 2, 40) == multiply_adds(fill(static, 8, 1).graph)


def test_sizes_as_traced() -> None:
    module, _ = graph("llama", 3, 43, dynamic=True)
    sizes = values_of_sizes(module.graph)
    assert sorted(sizes.values()) == [3, 43]
    assert int(multiply_adds(module.graph).subs(sizes)) == FORMS["llama"].exact(3, 43)
    assert values_of_sizes(graph("llama", 2, 40)[0].graph) == {}


def test_layer_pass_ceiling() -> None:
    assert layer_pass_ceiling(15, 30, 4096, 512) == pytest.approx(1 / (0.5 + 0.5 / 8))
    assert layer_pass_ceiling(30, 30, 4096, 512) == 1
    assert layer_pass_ceiling(0, 30, 4096, 512) == 8
    assert layer_pass_ceiling(15, 30, 100, 512) == 1  # a prompt shorter than the tail


# ---------------------------------------------------------------- torch's own counter


def flops(function: Callable[..., Any], inputs: list[Any]) -> int:
    """What torch counts in matrix products, halved: multiply-adds."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        function(*inputs)
    found = counter.get_flop_counts()["Global"]
    return sum(count for op, count in found.items() if "scaled_dot_product" not in str(op)) // 2


def counted(module: GraphModule) -> sympy.Expr:
    """Ours, attention left out."""
    nodes = [n for n in module.graph.nodes if n.target in COUNTERS and "scaled_dot_product" not in str(n.target)]
    return sum((COUNTERS[node.target](node) for node in nodes), sympy.Integer(0))


@pytest.mark.parametrize("name", ["llama", "llama_eager", "gpt2", "phi", "bloom", "xglm", "gemma2"])
def test_matrix_products_agree_with_torch(name: str) -> None:
    model = FILLED[name].build()
    module, inputs = traced_decoder(model, token_ids(40, batch=2), logits_to_keep=KEPT)
    assert counted(module) == flops(module, inputs)
    after = fill(module, 8, 1)
    assert counted(after) == flops(after, inputs)
    assert counted(after) < counted(module)


X, Y, W, C = torch.randn(2, 6, 4), torch.randn(2, 4, 5), torch.randn(5, 4), torch.randn(8, 2, 3)
PRODUCTS: list[tuple[Callable[..., Tensor], list[Tensor]]] = [
    (functional.linear, [X, W]),
    (torch.matmul, [X, Y]),
    (torch.matmul, [X, Y[0]]),
    (torch.matmul, [X[0], Y]),
    (torch.bmm, [X, Y]),
    (torch.mm, [X[0], Y[0]]),
    (torch.addmm, [W[:, 0], X[0], Y[0]]),
    (torch.baddbmm, [W[:, 0], X, Y]),
    (lambda x, y: torch.einsum("bij,bjk->bik", x, y), [X, Y]),
    (lambda x, y: torch.einsum("bij,kj->bik", x, y), [X, W]),
    (lambda x, c: functional.conv1d(x, c, groups=2), [X[:, :4], C]),
    (lambda x, c: functional.conv1d(x, c, padding=1), [X[:, :2], C]),
]


@pytest.mark.parametrize(("function", "inputs"), PRODUCTS)
def test_one_product_agrees_with_torch(function: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    module = traced(lambda *given: (function(*given),), *inputs)
    assert multiply_adds(module.graph) == flops(function, inputs)


def test_attention_counts_the_pairs_that_are_seen() -> None:
    query, keys, values = torch.randn(2, 3, 6, 4), torch.randn(2, 3, 9, 4), torch.randn(2, 3, 9, 5)

    def count(keys: Tensor, values: Tensor, **how: Any) -> sympy.Expr:
        module = traced(lambda q, k, v: (functional.scaled_dot_product_attention(q, k, v, **how),), query, keys, values)
        assert len([n for n in module.graph.nodes if n.target is aten.scaled_dot_product_attention.default]) == 1
        return multiply_adds(module.graph)

    assert count(keys, values) == 2 * 3 * (6 * 9) * (4 + 5)
    assert count(keys[:, :, :6], values[:, :, :6], is_causal=True) == 2 * 3 * (6 * 7 // 2) * (4 + 5)
    assert count(keys, values, is_causal=True) == 2 * 3 * (6 * 7 // 2) * (4 + 5)
    assert count(keys[:, :1], values[:, :1], enable_gqa=True) == 2 * 3 * (6 * 9) * (4 + 5)
