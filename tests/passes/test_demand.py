"""Which rows of every value are read, on graphs small enough to say so by hand."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import functional

from ridgefill_compile.passes.demand import analyse, has_effect
from ridgefill_compile.passes.rows import EVERYTHING, NOTHING, Demand, Rows
from tests.passes.graphs import aten, named, only, traced

B, N, D = 2, 6, 4
X, W = torch.randn(B, N, D), torch.randn(3 * D, D)


def read(module: GraphModule, *targets: object) -> list[Demand]:
    """Demand on the one call of each op."""
    demands = analyse(module.graph)
    return [demands.on(only(module, target)) for target in targets]


def one(module: GraphModule, target: object) -> Demand:
    """Demand on the one call of an op."""
    return read(module, target)[0]


def last(demand: Demand, dim: int, blocks: int = 1) -> int:
    """How many rows of the expected dimension."""
    assert isinstance(demand, Rows), demand
    assert (demand.dim, demand.blocks) == (dim, blocks)
    return demand.last


def test_outputs_are_read_whole_and_a_slice_reads_its_rows() -> None:
    module = traced(lambda x, w: (functional.linear(x.sin(), w)[:, -2:],), X, W)
    sine, linear, piece = read(module, aten.sin.default, aten.linear.default, aten.slice.Tensor)
    assert piece is EVERYTHING
    assert last(linear, 1) == last(sine, 1) == 2


def test_two_readers_join() -> None:
    def nested(x: Tensor) -> tuple[Tensor, ...]:
        h = x.sin()
        return h[:, -2:].cos(), h[:, -5:].exp()

    def crossed(x: Tensor) -> tuple[Tensor, ...]:
        h = x.sin()
        return h[:, -2:].cos(), h[..., -2:].exp()

    def whole(x: Tensor) -> tuple[Tensor, ...]:
        h = x.sin()
        return h[:, -2:].cos(), h.exp()

    assert last(one(traced(nested, X), aten.sin.default), 1) == 5
    assert read(traced(crossed, X), aten.sin.default) == [EVERYTHING]
    assert read(traced(whole, X), aten.sin.default) == [EVERYTHING]


def test_rows_of_every_spelling_of_a_suffix() -> None:
    assert last(one(traced(lambda x: (x.sin()[:, 2:],), X), aten.sin.default), 1) == 4
    assert last(one(traced(lambda x: (x.sin()[:, 2:N],), X), aten.sin.default), 1) == 4
    assert read(traced(lambda x: (x.sin()[:, :-1],), X), aten.sin.default) == [EVERYTHING]
    assert read(traced(lambda x: (x.sin()[:, 1:3],), X), aten.sin.default) == [EVERYTHING]
    assert read(traced(lambda x: (x.sin()[:, 1::2],), X), aten.sin.default) == [EVERYTHING]


def test_index_of_the_last_row_reads_that_row() -> None:
    """`x[:, -1]` reads one row, as `x[:, -1:]` does."""
    assert last(one(traced(lambda x: (x.sin()[:, -1],), X), aten.sin.default), 1) == 1
    assert read(traced(lambda x: (x.sin()[:, -2],), X), aten.sin.default) == [EVERYTHING]


def test_suffix_of_symbolic_length_is_read_whole() -> None:
    """Its number of rows is not a plain number."""
    module = traced(lambda x: (x.sin()[:, 2:],), X, dynamic=[(0, 1)])
    assert read(module, aten.sin.default) == [EVERYTHING]
    module = traced(lambda x: (x.sin()[:, -2:],), X, dynamic=[(0, 1)])
    assert last(one(module, aten.sin.default), 1) == 2


def test_rows_of_a_joint_are_its_last_operands() -> None:
    module = traced(lambda x, y: (torch.cat([x.sin(), y.cos()], 1)[:, -2:],), X, X)
    sine, cosine = read(module, aten.sin.default, aten.cos.default)
    assert sine is NOTHING
    assert last(cosine, 1) == 2
    module = traced(lambda x, y: (torch.cat([x.sin(), y.cos()], 1)[:, -N - 1 :],), X, X)
    assert read(module, aten.sin.default, aten.cos.default) == [EVERYTHING, EVERYTHING]


def test_results_of_one_call_are_narrowed_together() -> None:
    def rows(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        q, k, v = functional.linear(x, w).split(D, -1)
        return q[:, -2:].sin(), k[:, -4:].cos(), v[:, -1:].exp()

    def whole(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        q, k, v = functional.linear(x, w).split(D, -1)
        return q[:, -2:].sin(), k.cos(), v.exp()

    pieces, linear = read(traced(rows, X, W), aten.split.Tensor, aten.linear.default)
    assert last(pieces, 1) == last(linear, 1) == 4
    assert read(traced(whole, X, W), aten.split.Tensor) == [EVERYTHING]


def test_values_and_indices() -> None:
    def best(x: Tensor) -> tuple[Tensor, ...]:
        values, indices = x.sin().topk(2)
        return values[:, -1:].cos(), indices[:, -3:] + 1

    assert last(one(traced(best, X), aten.sin.default), 1) == 3


def test_op_without_a_rule_reads_everything_and_is_listed() -> None:
    def rows(x: Tensor) -> tuple[Tensor, ...]:
        return (x.sin().cumsum(1).cos()[:, -2:],)

    module = traced(rows, X)
    demands = analyse(module.graph)
    assert demands.blocked == [only(module, aten.cumsum.default)]
    assert demands.on(only(module, aten.cumsum.default)) is EVERYTHING
    assert demands.on(only(module, aten.sin.default)) is EVERYTHING
    assert last(demands.on(only(module, aten.cos.default)), 1) == 2


def test_rows_that_are_all_of_them_are_no_obstacle() -> None:
    module = traced(lambda x: (x.sin().cumsum(1)[:, -N:],), X)
    assert analyse(module.graph).blocked == []
    assert read(module, aten.cumsum.default) == [EVERYTHING]


def test_causal_attention_reads_queries_by_row_and_keys_whole() -> None:
    def attend(x: Tensor) -> tuple[Tensor, ...]:
        y = functional.scaled_dot_product_attention(x.sin(), x.cos(), x.exp(), is_causal=True)
        return (y[:, -2:],)

    for dynamic in ([], [(0, 1)]):
        query, key, value = read(
            traced(attend, X, dynamic=dynamic), aten.sin.default, aten.cos.default, aten.exp.default
        )
        assert last(query, 1) == 2
        assert key is EVERYTHING
        assert value is EVERYTHING


def test_the_same_size_as_rows_and_as_keys() -> None:
    """Attention spelt out on as many rows as heads as entries: only the query's rows are few."""

    def attend(x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        q, k, v = x.sin(), x.cos(), x.exp()
        scores = q @ k.transpose(-1, -2) + mask.tan()
        return ((scores.softmax(-1) @ v)[:, :, -2:],)

    module = traced(attend, torch.randn(4, 4, 4, 4), torch.randn(4, 4))
    query, key, value, mask = read(module, aten.sin.default, aten.cos.default, aten.exp.default, aten.tan.default)
    assert last(query, 2) == 2
    assert last(mask, 0) == 2
    assert key is EVERYTHING
    assert value is EVERYTHING


def test_flattened_batch_is_read_in_blocks() -> None:
    def rows(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        flat = functional.linear(x.sin().reshape(-1, D), w)
        return (flat.view(B, N, 3 * D)[:, -2:],)

    sine, linear = read(traced(rows, X, W), aten.sin.default, aten.linear.default)
    assert last(linear, 0, blocks=B) == last(sine, 1) == 2


def test_effects_are_read_and_dead_code_is_not() -> None:
    def write(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        cache.copy_(x.sin())
        x.tan()
        return (x.cos()[:, -1:],)

    module = traced(write, X, X.clone())
    sine, cosine = read(module, aten.sin.default, aten.cos.default)
    assert sine is EVERYTHING
    assert last(cosine, 1) == 1
    assert not named(module, aten.tan.default)  # functionalize took it
    module = traced(lambda x: (x.tan(), x.cos()[:, -1:])[1:], X, functional=False)
    assert read(module, aten.tan.default) == [NOTHING]


def test_what_has_an_effect() -> None:
    def calls(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        y.add_(1)
        torch._assert_async(x.sum() > 0)
        return (functional.dropout(x, 0.5), functional.scaled_dot_product_attention(x, x, x))

    module = traced(calls, X, X.clone(), functional=False)
    found = {node.target for node in module.graph.nodes if has_effect(node)}
    assert found == {aten.add_.Tensor, aten._assert_async.default}


def test_demand_of_one_value_back_to_another() -> None:
    module = traced(lambda x, w: (functional.linear(x.sin().cos(), w).exp(),), X, W)
    state, source = only(module, aten.exp.default), only(module, aten.cos.default)
    demands = analyse(module.graph, [(state, Rows(1, 1))], stop=source)
    assert last(demands.on(source), 1) == 1
    assert demands.on(only(module, aten.sin.default)) is NOTHING
    assert not demands.blocked


def test_calls_are_what_computes_the_rows() -> None:
    module = traced(lambda x, w: (functional.linear(x.sin(), w)[:, -2:],), X, W)
    linear = only(module, aten.linear.default)
    call = analyse(module.graph).calls[linear]
    assert call.target is aten.linear.default
    assert last(call.args[0].rows, 1) == 2
    assert isinstance(call.args[1], Node)
