"""Mixtures of experts as one row-by-row call: what may be collapsed, what may not, and that both compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from ridgefill_compile.passes.demand import analyse
from ridgefill_compile.passes.eliminate import eliminate
from ridgefill_compile.passes.experts import Region, collapse, expand
from ridgefill_compile.passes.functionalize import functionalize
from ridgefill_compile.passes.rows import Rows
from ridgefill_compile.passes.verify import verify
from tests.passes.graphs import aten, named, traced

pytest.importorskip("transformers.integrations.moe")
grouped = torch.ops.transformers.grouped_mm_fallback

ROWS, D, INNER, EXPERTS, PER_ROW = 12, 4, 6, 4, 2  # PER_ROW * INNER == ROWS, and D == EXPERTS: sizes that collide


def real(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


GATE, UP, DOWN = real(EXPERTS, D), real(EXPERTS, D, INNER), real(EXPERTS, INNER, D)
BIAS = real(EXPERTS, INNER)
Parts = Any  # steps of a mixture, by name


def routed(x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's experts and their weights, [rows, PER_ROW]."""
    weights, chosen = torch.nn.functional.linear(x, gate).softmax(-1).topk(PER_ROW, -1)
    return weights, chosen


def mixture(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    bias: Tensor,
    *,
    owner: Callable[[Tensor], Tensor] = lambda order: order // PER_ROW,
    counts: Callable[[Tensor, Tensor], Tensor] = lambda sorted_keys, keys: torch.histc(
        sorted_keys.float(), EXPERTS, 0, EXPERTS - 1
    ),
    ends: Callable[[Tensor], Tensor] = lambda counts: counts.cumsum(0, dtype=torch.int32),
    between: Callable[[Tensor], Tensor] = lambda y: y.relu(),
    keys: Callable[[Tensor], Tensor] = lambda chosen: chosen.reshape(-1),
    back: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """A mixture of experts over rows x [rows, D], step by step; each step can be replaced."""
    weights, chosen = routed(x, gate)
    key = keys(chosen)
    sorted_keys, order = torch.sort(key)
    selected = x[owner(order)]
    groups = ends(counts(sorted_keys, key))
    hidden = grouped(selected, up, groups) + bias[sorted_keys]
    result = grouped(between(hidden), down, groups) * weights.reshape(-1)[order].unsqueeze(-1)
    if back is None:
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.size(0))
    else:
        inverse = back(order)
    return result[inverse].view(-1, PER_ROW, D).sum(1)


def one_row_at_a_time(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    """The same, without sorting anything."""
    results = []
    for row in x:
        weights, chosen = routed(row[None], gate)
        parts = [((row @ up[e] + bias[e]).relu() @ down[e]) * w for w, e in zip(weights[0], chosen[0], strict=True)]
        results.append(torch.stack(parts).sum(0))
    return torch.stack(results)


WEIGHTS = (GATE, UP, DOWN, BIAS)


def graph_of(function: Callable[..., Any], x: Tensor, dynamic: bool = False) -> GraphModule:
    return functionalize(
        traced(lambda x, *w: (function(x, *w),), x, *WEIGHTS, dynamic=[(0, 0)] if dynamic else [], functional=False)
    )


def regions(module: GraphModule) -> list[Any]:
    return [node for node in module.graph.nodes if isinstance(node.target, Region)]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_mixture_becomes_one_call(dynamic: bool) -> None:
    module = graph_of(mixture, real(ROWS, D), dynamic)
    collapsed = collapse(module)
    assert len(regions(collapsed)) == 1
    assert not named(collapsed, aten.sort.default)
    verify(collapsed, module, "collapse")
    expanded = expand(collapsed)
    verify(expanded, collapsed, "expand")
    assert not regions(expanded)
    for rows in (ROWS, 7) if dynamic else (ROWS,):
        x = real(rows, D)
        expected = one_row_at_a_time(x, *WEIGHTS)
        for graph in (module, collapsed, expanded):
            torch.testing.assert_close(graph(x, *WEIGHTS)[0], expected)


@pytest.mark.parametrize(
    ("second", "proved"), [(lambda x: x.argmax(-1, True), True), (lambda x: (x * 1).long(), False)]
)
def test_choices_of_a_row_may_be_joined(second: Callable[[Tensor], Tensor], proved: bool) -> None:
    """Each found by an op that counts from 0; of what a value says, nothing is known."""

    def keys(chosen: Tensor) -> Tensor:
        return torch.cat([chosen[:, :1], second(chosen.float()[:, 1:])], -1).reshape(-1)

    module = collapse(graph_of(lambda x, *w: mixture(x, *w, keys=keys), real(ROWS, D)))
    assert len(regions(module)) == proved


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("last", [1, 5, ROWS])
def test_fewer_rows_are_the_rows_of_all(last: int, dynamic: bool) -> None:
    def end(x: Tensor, *weights: Tensor) -> Tensor:
        return mixture(x, *weights)[-last:]

    module = collapse(graph_of(end, real(ROWS, D), dynamic))
    (region,) = regions(module)
    demands = analyse(module.graph)
    if last < ROWS:
        assert isinstance(demands.on(region), Rows)
        assert not [node for node in demands.blocked if node is region]
    narrowed = expand(eliminate(module))
    verify(narrowed, module, "eliminate")
    (sort,) = named(narrowed, aten.sort.default)
    assert sort.meta["val"][0].shape[0] == last * PER_ROW
    torch.testing.assert_close(narrowed(real(ROWS, D), *WEIGHTS)[0], one_row_at_a_time(real(ROWS, D), *WEIGHTS)[-last:])


def test_rows_of_each_sample() -> None:
    """A batch is flattened before it is routed: the last rows of each sample are blocks."""

    def end(x: Tensor, *weights: Tensor) -> Tensor:
        return mixture(x.reshape(-1, D), *weights).view(2, -1, D)[:, -3:]

    x = real(2, 8, D)
    module = collapse(graph_of(end, x))
    narrowed = expand(eliminate(module))
    verify(narrowed, module, "eliminate")
    assert named(narrowed, aten.sort.default)[0].meta["val"][0].shape[0] == 2 * 3 * PER_ROW
    torch.testing.assert_close(
        narrowed(x, *WEIGHTS)[0], torch.stack([one_row_at_a_time(part, *WEIGHTS)[-3:] for part in x])
    )


ALIKE: dict[str, Parts] = {
    "argsort undone by argsort": {"back": lambda order: order.argsort()},
    "stably sorted": {"keys": lambda chosen: chosen.flatten()},
    "gated": {"between": lambda y: torch.cat([y[:, 3:] * y[:, :3], y[:, :3]], -1)},
    "normed": {"between": lambda y: torch.nn.functional.layer_norm(y, [INNER])},
    "masked out": {"keys": lambda chosen: chosen.masked_fill(chosen == 1, 3).reshape(-1)},
}


@pytest.mark.parametrize("name", ALIKE)
def test_other_spellings(name: str) -> None:
    module = graph_of(lambda x, *w: mixture(x, *w, **ALIKE[name]), real(ROWS, D))
    assert len(regions(collapse(module))) == 1
    x = real(ROWS, D)
    torch.testing.assert_close(expand(collapse(module))(x, *WEIGHTS), module(x, *WEIGHTS))


MIXED: dict[str, Parts] = {
    "owners of other rows": {"owner": lambda order: (order + 1) % ROWS},
    "counts of all rows but one": {
        "counts": lambda sorted_keys, keys: torch.histc(sorted_keys[1:].float(), EXPERTS, 0, EXPERTS - 1)
    },
    "counts of other keys": {
        "counts": lambda sorted_keys, keys: torch.histc(keys.flip(0).float() * 0, EXPERTS, 0, EXPERTS - 1)
    },
    "counts in other bins": {"counts": lambda sorted_keys, keys: torch.histc(sorted_keys.float(), EXPERTS, 0, EXPERTS)},
    "counts of doubled keys": {
        "counts": lambda sorted_keys, keys: torch.histc(sorted_keys.float() * 2, EXPERTS, 0, EXPERTS - 1)
    },
    "counts not cumulated": {"ends": lambda counts: counts.to(torch.int32) * 2},
    "counts cumulated twice": {"ends": lambda counts: counts.cumsum(0).cumsum(0, dtype=torch.int32).clamp(max=24)},
    "centred over the rows": {"between": lambda y: y - y.mean(0)},
    "summed along the rows": {"between": lambda y: y.cumsum(0)},
    "rows turned round": {"between": lambda y: y.flip(0)},
    "rows moved on": {"between": lambda y: torch.cat([y[1:], y[:1]])},
    "a row beside its neighbour": {"between": lambda y: y.reshape(-1, 2 * INNER).relu().reshape(-1, INNER)},
    "places added": {"between": lambda y: y + torch.arange(y.shape[0])[:, None]},
    "left sorted": {"back": lambda order: torch.arange(order.shape[0])},
    "sorted again": {"back": lambda order: order},
    "negative keys": {"keys": lambda chosen: (chosen - 1).reshape(-1)},
}


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_rows_is_left_alone(name: str) -> None:
    module = graph_of(lambda x, *w: mixture(x, *w, **MIXED[name]), real(ROWS, D))
    assert not regions(collapse(module))


def test_what_others_read_stays() -> None:
    """Counts that are a result of their own are computed on all rows; the mixture is one call all the same."""

    def both(x: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        kept = []

        def counts(sorted_keys: Tensor, keys: Tensor) -> Tensor:
            kept.append(torch.histc(sorted_keys.float(), EXPERTS, 0, EXPERTS - 1))
            return kept[0]

        return mixture(x, *weights, counts=counts)[-2:], kept[0]

    x = real(ROWS, D)
    module = functionalize(traced(both, x, *WEIGHTS, functional=False))
    result = expand(eliminate(collapse(module)))
    torch.testing.assert_close(result(x, *WEIGHTS), module(x, *WEIGHTS))
    assert [node.meta["val"][0].shape[0] for node in named(result, aten.sort.default)] == [ROWS * PER_ROW, 2 * PER_ROW]
