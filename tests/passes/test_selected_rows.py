"""Rows taken and put back, against plain indexing; and elimination of what reads them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from ridgefill_compile.passes.calls import TO_THE_END, shape
from ridgefill_compile.passes.demand import SELECTION, analyse
from ridgefill_compile.passes.eliminate import eliminate
from ridgefill_compile.passes.emit import Emitter, fake_mode_of, inputs_of
from ridgefill_compile.passes.rows import Rows
from ridgefill_compile.passes.selected_rows import put_rows, spread_rows, take_entries, take_rows, with_last
from ridgefill_compile.passes.verify import verify
from tests.passes.graphs import aten, named, traced

BATCH, ROWS, WIDTH = 3, 8, 4
SHARED = torch.tensor([1, 4, 6])
OWN = torch.tensor([[0, 2, 5], [1, 2, 3], [4, 5, 6]])
_generator = torch.Generator().manual_seed(0)


def real(*size: int) -> Tensor:
    return torch.randn(size, generator=_generator)


# ---------------------------------------------------------------- taken and put back


def test_the_same_rows_of_every_sequence() -> None:
    value = real(BATCH, ROWS, WIDTH)
    assert torch.equal(take_rows(value, SHARED, 1), value[:, SHARED])
    assert torch.equal(take_rows(value[0], SHARED, 0), value[0][SHARED])
    assert torch.equal(take_rows(value.transpose(1, 2), SHARED, 2), value[:, SHARED].transpose(1, 2))


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 0, 1), (0, 2, 1), (2, 1, 0), (1, 2, 0)])
def test_of_each_sequence_its_own(order: tuple[int, ...]) -> None:
    """Wherever sequences and rows are among the dimensions."""
    value = real(BATCH, ROWS, WIDTH)
    expected = torch.stack([one[own] for one, own in zip(value, OWN, strict=True)])
    dim, batch = order.index(1), order.index(0)
    laid_out = value.permute(order)
    assert torch.equal(take_rows(laid_out, OWN, dim, batch), expected.permute(order))
    new = real(BATCH, OWN.shape[1], WIDTH)
    put = value.clone()
    for sequence in range(BATCH):
        put[sequence, OWN[sequence]] = new[sequence]
    assert torch.equal(put_rows(laid_out, OWN, new.permute(order), dim, batch), put.permute(order))


def test_a_value_that_is_the_same_for_every_sequence() -> None:
    value = real(ROWS, WIDTH)
    expected = torch.stack([value[own] for own in OWN])
    assert torch.equal(take_rows(value, OWN, 0, -1), expected)
    assert torch.equal(take_rows(value, OWN, 0, -2), expected.unsqueeze(1))
    assert torch.equal(take_rows(value[None], OWN, 1, 0), expected)
    assert torch.equal(take_rows(value[None, None], OWN, 2, 0), expected.unsqueeze(1))


def test_put_back_what_was_taken() -> None:
    value = real(BATCH, ROWS, WIDTH)
    assert torch.equal(put_rows(value, SHARED, take_rows(value, SHARED, 1), 1), value)
    assert torch.equal(put_rows(value, OWN, take_rows(value, OWN, 1, 0), 1, 0), value)
    put = put_rows(value, SHARED, torch.zeros(BATCH, 3, WIDTH), 1)
    assert torch.equal(put[:, SHARED], torch.zeros(BATCH, 3, WIDTH))
    assert torch.equal(put[:, [0, 2, 3, 5, 7]], value[:, [0, 2, 3, 5, 7]])


@pytest.mark.parametrize("each", [1, 2, 3])
def test_entries(each: int) -> None:
    """Several of a position, and of the blocks of one dimension."""
    apart = real(BATCH, ROWS, each, WIDTH)
    alike = torch.stack([one[SHARED] for one in apart])
    own = torch.stack([one[rows] for one, rows in zip(apart, OWN, strict=True)])
    assert torch.equal(take_entries(apart[0].flatten(0, 1), SHARED, 0, each), alike[0].flatten(0, 1))
    assert torch.equal(take_entries(apart.flatten(1, 2), SHARED, 1, each), alike.flatten(1, 2))
    assert torch.equal(take_entries(apart.flatten(0, 2), OWN, 0, each, 0), own.flatten(0, 2))
    assert torch.equal(take_entries(apart.flatten(1, 2), OWN, 1, each, 0), own.flatten(1, 2))
    last = apart.flatten(1, 2).permute(1, 2, 0)
    assert torch.equal(take_entries(last, OWN, 0, each, 2), own.flatten(1, 2).permute(1, 2, 0))
    spread = torch.stack([apart[0][rows] for rows in OWN])
    assert torch.equal(take_entries(apart[0].flatten(0, 1), OWN, 0, each, -1), spread.flatten(1, 2))


@pytest.mark.parametrize("last", [1, 2])
def test_rows_in_their_places_among_zeros(last: int) -> None:
    like = real(BATCH, ROWS, WIDTH)
    rows = real(BATCH, 3 + last, WIDTH)
    expected = torch.zeros(BATCH, ROWS, WIDTH)
    for sequence in range(BATCH):
        expected[sequence, [*OWN[sequence].tolist(), *range(ROWS - last, ROWS)]] = rows[sequence]
    assert torch.equal(spread_rows(rows, OWN, like, 1, last, 0), expected)
    expected = torch.zeros(BATCH, ROWS, WIDTH)
    expected[:, [*SHARED.tolist(), *range(ROWS - last, ROWS)]] = rows
    assert torch.equal(spread_rows(rows, SHARED, like, 1, last), expected)


def test_an_index_with_the_last_positions() -> None:
    assert with_last(SHARED, ROWS, 1).tolist() == [1, 4, 6, 7]
    assert with_last(OWN[:, :1], 9, 2).tolist() == [[0, 7, 8], [1, 7, 8], [4, 7, 8]]


# ---------------------------------------------------------------- what reads them

TAIL, COUNT, HEADS = 2, 2, 2
INDEX = torch.tensor([[0, 2], [1, 4], [2, 3]])
Function = Callable[..., Tensor]


def routed(function: Function, index: Tensor, others: list[Tensor], dynamic: bool) -> tuple[GraphModule, list[Tensor]]:
    """A late value [batch, rows, width] of which a graph returns selected and last rows among those of another.

    One index for all is for one sequence.
    """
    batch = 1 if index.dim() == 1 else BATCH
    others = [value[:batch] if len(value) == BATCH else value for value in others]
    inputs = [index, real(batch, ROWS, WIDTH), real(batch, ROWS - TAIL, WIDTH), *others]
    sizes = [(1, 1), (2, 1)] if dynamic else []
    module = traced(lambda index, x, base, *others: (function(x, *others),), *inputs, dynamic=sizes)
    graph, output = module.graph, module.graph.output_node()
    emit = Emitter(graph, fake_mode_of(graph))
    where, _, base, *_ = inputs_of(graph)
    (value,) = output.all_input_nodes
    at = None if index.dim() == 1 else 0
    with graph.inserting_before(output):
        exact = emit(take_rows, value, where, 1, at)
        exact.meta[SELECTION] = TAIL
        put = emit(put_rows, base, where, exact, 1, at)
        tail = emit(aten.slice.Tensor, value, 1, -TAIL, TO_THE_END)
        output.args = ((emit(aten.cat.default, [put, tail], 1),),)
    module.recompile()
    return module, inputs


def in_heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def causal(x: Tensor) -> Tensor:
    query = in_heads(x)
    return nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True).transpose(1, 2).flatten(2)


def masked(x: Tensor, mask: Tensor) -> Tensor:
    query = in_heads(x)
    mixed = nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)
    return mixed.transpose(1, 2).flatten(2)


def spelt(x: Tensor) -> Tensor:
    scores = in_heads(x) @ in_heads(x).transpose(-1, -2)
    hidden = torch.ones(x.shape[1], x.shape[1], device=x.device).triu(1).bool()
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ in_heads(x)).transpose(1, 2).flatten(2)


def rows_alone(x: Tensor, matrix: Tensor) -> Tensor:
    return (x.reshape(-1, x.shape[-1]) @ matrix).tanh().view(x.shape)


def in_pairs(x: Tensor, matrix: Tensor) -> Tensor:
    """Two entries of a row, each alone, in one dimension with the sequences."""
    return (x.reshape(-1, 2) @ matrix).reshape(x.shape)


def in_pairs_of_a_sequence(x: Tensor) -> Tensor:
    """The same beside them; by an op without a rule."""
    return x.reshape(x.shape[0], -1, 2).logcumsumexp(-1).reshape(x.shape)


def in_pairs_of_all(x: Tensor) -> Tensor:
    return x.reshape(-1, 2).logcumsumexp(-1).reshape(x.shape)


def no_rule(x: Tensor) -> Tensor:
    return x.logcumsumexp(1) * 2


def with_places(x: Tensor, places: Tensor) -> Tensor:
    """Something of every row that is the same for all sequences."""
    return x * (places * 3).exp() + x


def scanned(x: Tensor) -> Tensor:
    states = x.unflatten(-1, (HEADS, -1))
    return torch.ops.ridgefill.linear_attention(states, states, states, -x[..., :HEADS].abs(), None)[0].flatten(2)


def convolved(x: Tensor, kernel: Tensor) -> Tensor:
    padded = nn.functional.pad(x.transpose(1, 2), (2, 0))
    return nn.functional.conv1d(padded, kernel, groups=WIDTH).transpose(1, 2).tanh()


def shifted(x: Tensor) -> Tensor:
    return torch.cat([x[:, :1], x[:, :-1]], 1).exp()


def sorted_rows(x: Tensor) -> Tensor:
    values, order = x.sort(-1)
    return values + order


FUNCTIONS: dict[str, tuple[Function, list[Tensor]]] = {
    "causal": (causal, []),
    "mask for all": (masked, [real(ROWS, ROWS)]),
    "mask of sequences": (masked, [real(BATCH, 1, ROWS, ROWS)]),
    "mask of keys": (masked, [real(BATCH, 1, 1, ROWS)]),
    "mask of heads": (masked, [real(HEADS, ROWS, ROWS)]),
    "spelt": (spelt, []),
    "rows alone": (rows_alone, [real(WIDTH, WIDTH)]),
    "pairs": (in_pairs, [real(2, 2)]),
    "pairs of a sequence": (in_pairs_of_a_sequence, []),
    "pairs of all": (in_pairs_of_all, []),
    "no rule": (no_rule, []),
    "places": (with_places, [real(ROWS, 1)]),
    "places, with a dimension of one": (with_places, [real(1, ROWS, 1)]),
    "scan": (scanned, []),
    "convolution": (convolved, [real(WIDTH, 1, 3)]),
    "shift": (shifted, []),
    "several results": (sorted_rows, []),
}
FIXED = {name for name, (_, others) in FUNCTIONS.items() if any(ROWS in value.shape for value in others)}
ANY_LENGTH = [pytest.param(name, True, id=f"{name}, dynamic") for name in FUNCTIONS if name not in FIXED]


@pytest.mark.parametrize("index", [INDEX, INDEX[0]], ids=["own", "shared"])
@pytest.mark.parametrize(
    ("name", "dynamic"), [*(pytest.param(name, False, id=name) for name in FUNCTIONS), *ANY_LENGTH]
)
def test_elimination_changes_nothing(name: str, index: Tensor, dynamic: bool) -> None:
    function, others = FUNCTIONS[name]
    module, inputs = routed(function, index, others, dynamic)
    verify(module, None, "route")
    narrowed = eliminate(module)
    verify(narrowed, module, "eliminate")
    torch.testing.assert_close(narrowed(*inputs), module(*inputs))
    (value,) = (node.args[0] for node in module.graph.nodes if node.target is take_rows)
    demand = analyse(module.graph).on(value)
    assert isinstance(demand, Rows)
    assert str(demand) == f"{COUNT} selected and the last {TAIL} of dim 1"
    wide = [node for node in named(narrowed, value.target) if shape(node)[1:] == (ROWS, WIDTH)]
    assert not wide or name == "scan", "the value is computed on every row"


@pytest.mark.parametrize("index", [INDEX, INDEX[0]], ids=["own", "shared"])
def test_one_graph_for_other_lengths(index: Tensor) -> None:
    module, _ = routed(causal, index, [], dynamic=True)
    narrowed = eliminate(module)
    batch = 1 if index.dim() == 1 else BATCH
    for rows in (7, 9, 17):
        inputs = [index, real(batch, rows, WIDTH), real(batch, rows - TAIL, WIDTH)]
        torch.testing.assert_close(narrowed(*inputs), module(*inputs))
