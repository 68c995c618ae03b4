"""Fused projections taken apart: same values, and of filled rows only the columns that are read on them."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import functional

from ridgefill_compile.cost import multiply_adds
from ridgefill_compile.passes.calls import shape
from ridgefill_compile.passes.columns import WEIGHTS
from ridgefill_compile.passes.eliminate import eliminate
from ridgefill_compile.passes.unfuse import unfuse
from ridgefill_compile.passes.verify import verify
from tests.passes.graphs import aten, named, traced

B, N, D = 2, 11, 5
HEADS, SIZE = 3, 4
PART = HEADS * SIZE
T = 2
Graph = Callable[..., tuple[Tensor, ...]]


def real(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


X, W = real(B, N, D), real(3 * PART, D)


def unfused(
    function: Graph, *inputs: Tensor, dynamic: Collection[tuple[int, int]] = (), close: float = 1e-5
) -> GraphModule:
    """What is left of a graph's rows, taken apart and verified; equal on the inputs it was traced with."""
    before = traced(function, *inputs, dynamic=dynamic)
    apart = unfuse(before)
    verify(apart, before, "unfuse")
    after = eliminate(apart)
    verify(after, apart, "eliminate")
    expected = before(*inputs)
    for module in (apart, after):
        torch.testing.assert_close(module(*inputs), expected, rtol=close, atol=close)
    return after


def columns_on_all_rows(module: GraphModule) -> int:
    """How many columns of projections are computed on every row."""
    every = (N, B * N)
    products = [node for node in module.graph.nodes if node.target in WEIGHTS]
    return sum(int(shape(node)[-1]) for node in products if shape(node)[-2] in every)


def tail(x: Tensor, dim: int = 1) -> Tensor:
    return x[(slice(None),) * dim + (slice(-T, None),)]


def taps(w: Tensor, channels: int) -> Tensor:
    """Of a convolution of one channel each, [channels, 1, 3]."""
    return w[:channels, :3].unsqueeze(1)


# ---------------------------------------------------------------- ways in which models cut a projection


def side_by_side(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    q, k, v = functional.linear(x, w).split(PART, -1)
    return tail(q).sin(), k.cos(), v.exp()


def by_slices(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = functional.linear(x, w)
    return tail(y[..., :PART]).sin(), y[..., PART : 2 * PART].cos(), y[..., 2 * PART :].exp()


def within_heads(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """GPT-NeoX: each head's queries, keys and values lie together."""
    q, k, v = functional.linear(x, w).view(B, N, HEADS, 3 * SIZE).transpose(1, 2).chunk(3, -1)
    return tail(q, 2).sin(), k.cos(), v.exp()


def selected_within_heads(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """BLOOM: the same, with a dimension for the three."""
    y = functional.linear(x, w).view(B, N, HEADS, 3, SIZE)
    return tail(y[..., 0, :].transpose(1, 2), 2).sin(), y[..., 1, :].cos(), y[..., 2, :].permute(0, 2, 3, 1).exp()


def keys_behind_queries(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Falcon: many heads of queries, then one of keys and one of values, looked up."""
    y = functional.linear(x, w).view(B, N, -1, SIZE)
    return tail(y[:, :, :-2]).transpose(1, 2).sin(), y[:, :, [-2]].cos(), y[:, :, [-1]].exp()


def rows_in_one_dimension(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """GPT-2: batch and rows in one dimension, weights transposed."""
    y = torch.addmm(w.sum(1), x.reshape(-1, D), w.t()).view(B, N, 3 * PART)
    q, k, v = y.split(PART, 2)
    return tail(q.view(B, N, HEADS, SIZE).transpose(1, 2), 2).sin(), k.view(B, N, HEADS, SIZE).cos(), v.exp()


def quarters(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """CodeGen: in two blocks, each of which has queries, values and keys."""
    q, v, k = functional.linear(x, w).reshape(B, N, 2, -1).split(PART // 2, -1)
    return tail(q.reshape(B, N, HEADS, SIZE)).sin(), k.reshape(B, N, HEADS, SIZE).cos(), v.exp()


def transposed_weights(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    q, k, v = (x @ w.T).unflatten(-1, (3, HEADS, SIZE)).unbind(2)
    return tail(q).sin(), k.cos(), v.exp()


def biased_and_clamped(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """MPT, DBRX; the bias is added by itself."""
    q, k, v = (functional.linear(x, w) + w.sum(1)).clamp(-2, 2).chunk(3, dim=2)
    return tail(q).sin(), k.cos(), v.exp()


def behind_a_convolution(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Gated DeltaNet: a convolution whose state keeps the last rows of all columns."""
    y = functional.linear(x, w).transpose(1, 2)
    mixed = functional.silu(functional.conv1d(y, taps(w, 3 * PART), None, 1, 2, 1, 3 * PART)[:, :, :N]).transpose(1, 2)
    q, k, v = mixed.split(PART, -1)
    return tail(q.reshape(B, N, HEADS, SIZE)).sin(), k.cos(), v.exp(), y[:, :, -3:].clone()


def behind_one_on_some(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Mamba 2: gates beside what the convolution works on, of which the last part is read on the tail alone."""
    gate, y, step = functional.linear(x, w).split([PART, 2 * PART - 3, 3], -1)
    padded = functional.pad(y.transpose(1, 2), (2, 0))
    channels = 2 * PART - 3
    mixed = functional.conv1d(padded, taps(w, channels), w[:channels, 3], groups=channels)
    hidden, read = functional.silu(mixed).transpose(1, 2).split([PART - 3, PART], -1)
    return tail(gate).sigmoid(), hidden.sin(), tail(read).cos(), step.exp()


def behind_a_join(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Qwen3-Next: parts of a projection are joined in another order, and cut again behind a convolution."""
    q, k, v = functional.linear(x, w).view(B, N, HEADS, 3 * SIZE).split(SIZE, -1)
    joined = torch.cat([part.reshape(B, N, PART) for part in (q, k, v)], -1).transpose(1, 2)
    mixed = functional.conv1d(joined, taps(w, 3 * PART), None, 1, 2, 1, 3 * PART)[:, :, :N].transpose(1, 2)
    q, k, v = mixed.split(PART, -1)
    return tail(q).sin(), k.cos(), v.exp()


def masked_rows(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    seen = (torch.arange(N) > 1).to(x.dtype)[None, :, None]
    k, q, v = (seen * functional.linear(x, w)).to(torch.float64).chunk(3, -1)
    return tail(q).sin(), k.cos(), v.exp()


WAYS = [
    side_by_side, by_slices, within_heads, selected_within_heads, quarters, rows_in_one_dimension, transposed_weights,
    biased_and_clamped, behind_a_convolution, behind_a_join, masked_rows,
]  # fmt: skip


@pytest.mark.parametrize("function", WAYS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_queries_of_a_fused_projection_are_computed_on_the_tail_alone(function: Graph, dynamic: bool) -> None:
    if dynamic and function is rows_in_one_dimension:
        pytest.skip("its sizes are written into the function")
    after = unfused(function, X, W, dynamic=[(1, 1)] if dynamic else ())  # symbolic: a size that means no rows
    assert columns_on_all_rows(after) == 2 * PART


def test_keys_that_are_looked_up_behind_the_queries() -> None:
    assert columns_on_all_rows(unfused(keys_behind_queries, X, W)) == 2 * SIZE


def test_gates_and_outputs_of_a_recurrence_are_computed_on_the_tail_alone() -> None:
    assert columns_on_all_rows(unfused(behind_one_on_some, X, W)) == PART


def test_symbolic_rows_and_batches() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        batch, rows, _ = x.shape
        q, k, v = functional.linear(x, w).view(batch, rows, HEADS, 3 * SIZE).transpose(1, 2).chunk(3, -1)
        return q[:, :, -T:].sin(), k.cos(), v.exp()

    before = traced(function, X, W, dynamic=[(0, 0), (0, 1)], sizes_first=True)
    after = eliminate(unfuse(before))
    verify(after, before, "unfuse and eliminate")
    for batch, rows in ((2, 11), (1, 7), (3, 30)):
        x = real(batch, rows, D)
        torch.testing.assert_close(after(batch, rows, x, W), function(x, W), rtol=1e-5, atol=1e-5)
    wide = [node for node in after.graph.nodes if node.target is aten.linear.default]
    assert sorted(int(shape(node)[-1]) for node in wide) == [PART, 2 * PART]


# ---------------------------------------------------------------- left alone


def alike(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    q, k, v = functional.linear(x, w).split(PART, -1)
    return q.sin(), k.cos(), v.exp()


def mixing(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    q, k, v = functional.layer_norm(functional.linear(x, w), [3 * PART]).split(PART, -1)
    return tail(q).sin(), k.cos(), v.exp()


def read_whole(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = functional.linear(x, w)
    return tail(y[..., :PART]).sin(), y[..., PART:].cos(), y.exp()


def convolved_across(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = functional.conv1d(
        functional.linear(x, w).transpose(1, 2), taps(w, 3 * PART).expand(-1, PART, -1), padding=1, groups=3
    )
    q, k, v = y.split(PART, 1)
    return tail(q, 2).sin(), k.cos(), v.exp()


@pytest.mark.parametrize("function", [alike, mixing, read_whole, convolved_across], ids=lambda f: f.__name__)
def test_what_is_left_as_it_is(function: Graph) -> None:
    before = traced(function, X, W)
    assert unfuse(before) is before


def test_two_parts_of_one_product_may_meet_again() -> None:
    def gated(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        gate, up, q = functional.linear(x, w).chunk(3, -1)
        return tail(functional.silu(gate) * up).sin(), tail(q).exp(), (gate + up).cos()

    assert columns_on_all_rows(unfused(gated, X, W)) == 2 * PART


def test_results_share_no_memory_that_they_did_not_share_before() -> None:
    def looked_up(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = functional.linear(x, w).view(B, N, -1, SIZE)
        joined = torch.cat([x, x.sin()], -1)
        return (
            tail(y[:, :, :-2]),
            y[:, :, [-2]],
            y[:, :, [-1]],
            tail(joined[..., :2]),
            joined[..., D:],
            joined[..., 3:D],
        )

    after = unfused(looked_up, X, W)
    results = after(X, W)
    places = [result.untyped_storage().data_ptr() for result in results]
    assert X.untyped_storage().data_ptr() not in places
    assert len(set(places[:3])) == 3


def test_parts_keep_their_names() -> None:
    def returned(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        q, k, v = functional.linear(x, w).view(B, N, HEADS, 3 * SIZE).split(SIZE, -1)
        return tail(q).sin(), k, v.transpose(1, 2)

    before = traced(returned, X, W)
    names = [node.name for node in before.graph.output_node().all_input_nodes]
    after = unfuse(before)
    assert [node.name for node in after.graph.output_node().all_input_nodes] == names
    assert len({node.name for node in after.graph.nodes}) == len(after.graph.nodes)


def test_readers_of_another_rank() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = functional.linear(x, w)
        return tail(y[..., :PART]).sin(), y[..., PART:].sum(1), y[..., PART:] + x.sum()[None, None, None, None]

    assert columns_on_all_rows(unfused(function, X, W)) == 2 * PART


def test_a_product_that_reads_a_part_of_another() -> None:
    def function(x: Tensor, w: Tensor, inner: Tensor) -> tuple[Tensor, ...]:
        q, latent, rest = functional.linear(x, w).chunk(3, -1)
        second = functional.linear(latent, inner)
        return tail(q).sin(), rest.cos(), tail(second[..., :3]).exp(), second[..., 3:].square()

    assert columns_on_all_rows(unfused(function, X, W, real(7, PART))) == 2 * PART + 4


def test_columns_that_are_read_both_ways_are_computed_once_on_all_rows() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = functional.linear(x, w)
        return tail(y[..., : 2 * PART]).sin(), y[..., PART:].cos()

    assert columns_on_all_rows(unfused(function, X, W)) == 2 * PART


def test_the_state_of_a_convolution_keeps_its_columns() -> None:
    after = unfused(behind_a_convolution, X, W)
    state = [node for node in named(after, aten.linear.default) if shape(node)[-1] == 3 * PART]
    assert [shape(node)[1] for node in state] == [3]


def test_a_view_of_a_part_that_lies_otherwise_now() -> None:
    """Heads of keys lay at even distances in the whole, and do not in a product without queries."""

    def viewed(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        q, k, v = functional.linear(x, w).view(B, N, HEADS, 3 * SIZE).split(SIZE, -1)
        return tail(q).sin(), k.view(-1, SIZE).cos(), v.exp(), k, k.reshape(B, N, PART)

    after = unfused(viewed, X, W)
    assert columns_on_all_rows(after) == 2 * PART
    results = after(X, W)
    assert results[3].untyped_storage().data_ptr() != results[4].untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "read",
    [
        lambda k: torch.view_as_real(torch.view_as_complex(k.unflatten(-1, (2, 2)))).sin(),
        lambda k: k.as_strided((2, 3), (1, 2)).sin(),
        lambda k: k.view(torch.int32) + 1,
    ],
    ids=["complex", "strides", "dtype"],
)
def test_readers_of_strides_keep_the_whole_product(read: Callable[[Tensor], Tensor]) -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        q, k, v, r = functional.linear(x, w[:12]).split([4, 4, 3, 1], -1)
        return tail(q).sin(), read(k), v.exp(), tail(r).cos()

    unfused(function, X, W)


def test_a_join_of_two_dtypes_is_left() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        joined = torch.cat([functional.linear(x, w[:PART]), functional.linear(x, w[PART:]).double()], -1)
        return tail(joined[..., PART:]).sin(), joined[..., :PART].cos()

    unfused(function, X, W)


def test_parts_that_overlap_in_another_order() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = functional.linear(x, w)
        return tail(y[..., :PART]).sin(), y[..., PART + 2 :: 3].exp(), y[..., -7:-3]

    unfused(function, X, W)


def test_a_chain_of_products() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        found = []
        for _ in range(9):
            q, x = functional.linear(x, w[: 2 * D]).split(D, -1)
            found.append(tail(q).sin())
        return (*found, x)

    assert columns_on_all_rows(unfused(function, X, 0.3 * W)) == 9 * D


def test_what_no_product_is_taken_apart_for() -> None:
    def vector(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return x @ w[0], torch.addmm(torch.ones(()), x[0], w.t())

    def empty(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        q, k, v = torch.cat([x.new_empty(0), functional.linear(x, w)], 1).split(PART, -1)
        return tail(q).sin(), k.cos(), v.exp()

    unfused(vector, X, W)
    unfused(empty, X, W)


def test_a_size_that_no_input_shows() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        batch, rows, _ = x.shape
        y = functional.linear(torch.cat([x, x], 0)[:, 1:], w).view(2 * batch, rows - 1, HEADS, 3, SIZE)
        return y[:, -T:, :, 0].sin(), y[..., 1, :].cos()

    before = traced(function, X, W, dynamic=[(0, 0), (0, 1)], sizes_first=True)
    after = eliminate(unfuse(before))
    torch.testing.assert_close(after(B, N, X, W), function(X, W), rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- any of them


def convolved(y: Tensor, w: Tensor) -> Tensor:
    channels = y.shape[-1]
    mixed = functional.conv1d(y.transpose(1, 2), taps(w, channels), None, 1, 2, 1, channels)
    return mixed[..., :N].transpose(1, 2)


def joined(y: Tensor, heads: int, kinds: int) -> list[Tensor]:
    found = y.view(B, N, heads, -1).chunk(kinds, -1)
    return list((torch.cat([part.reshape(B, N, -1) for part in found], -1) * 2).chunk(kinds, -1))


def slices(y: Tensor, heads: int, kinds: int) -> list[Tensor]:
    size = y.shape[-1] // kinds
    return [y[..., i * size :][..., :size] for i in range(kinds)]


STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda y, w: functional.silu(y),
    "bias": lambda y, w: w[: y.shape[-1], 0] + y,
    "mask": lambda y, w: torch.where(torch.arange(N)[:, None] < 3, 0.0, y),
    "double": lambda y, w: y.double().float(),
    "convolution": convolved,
}
CUTS: dict[str, Callable[[Tensor, int, int], list[Tensor]]] = {
    "split": lambda y, heads, kinds: list(y.split(y.shape[-1] // kinds, -1)),
    "slices": slices,
    "heads": lambda y, heads, kinds: list(y.view(B, N, heads, -1).transpose(1, 2).chunk(kinds, -1)),
    "kinds": lambda y, heads, kinds: [y.view(B, N, heads, kinds, -1)[..., i, :].transpose(1, 2) for i in range(kinds)],
    "join": joined,
}


@st.composite
def programs(draw: st.DrawFn) -> tuple[Graph, str]:
    """A projection, what is done to each column, how it is cut, and on which rows its parts are read."""
    heads, kinds, size = draw(st.integers(1, 3)), draw(st.integers(2, 4)), draw(st.integers(1, 3))
    cut = draw(st.sampled_from(sorted(CUTS)))
    before = draw(st.lists(st.sampled_from(sorted(STEPS)), max_size=3))
    whole = draw(st.lists(st.booleans(), min_size=kinds, max_size=kinds))
    state = draw(st.booleans())
    width = heads * kinds * size

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        first = y = functional.linear(x, w[:width])
        for step in before:
            y = STEPS[step](y, w)
        rows = 2 if cut in ("heads", "kinds") else 1
        found = []
        for every, part in zip(whole, CUTS[cut](y, heads, kinds), strict=True):
            found.append((part if every else tail(part, rows)).sin())
        return (*found, first[:, -1:].exp()) if state else tuple(found)

    return function, f"{heads} heads of {kinds} x {size}, {before}, cut by {cut}, whole {whole}, state {state}"


@given(programs())
def test_any_program_gives_the_same_and_costs_no_more(program: tuple[Graph, str]) -> None:
    function, told = program
    weights = real(36, D)
    after = unfused(function, X, weights, close=1e-4)  # three convolutions in a row may round 2e-5 apart
    plain = eliminate(traced(function, X, weights))
    extra = 36 * D * B * 2 + 36 * 2 * B * 8  # the fused product and its convolutions again, on the rows of the state
    assert int(multiply_adds(after.graph)) <= int(multiply_adds(plain.graph)) + extra, told
