"""The lattice of demands: `join` is its least upper bound."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ridgefill_compile.passes.rows import EVERYTHING, NOTHING, Demand, Rows, at_least, covers, join, same
from tests.passes.graphs import fake, fake_mode

rows = st.builds(Rows, st.integers(0, 3), st.integers(1, 4), st.integers(1, 3))
demands: st.SearchStrategy[Demand] = st.sampled_from([NOTHING, EVERYTHING]) | rows


def equal(left: Demand, right: Demand) -> bool:
    """The same demand. (`Rows` cannot be compared with ==: that would add guards.)"""
    if isinstance(left, Rows) and isinstance(right, Rows):
        return (left.dim, left.last, left.blocks) == (right.dim, right.last, right.blocks)
    return left is right


def below(left: Demand, right: Demand) -> bool:
    """The order that `join` should be the least upper bound of, stated on its own."""
    if isinstance(left, Rows) and isinstance(right, Rows):
        return (left.dim, left.blocks) == (right.dim, right.blocks) and left.last <= right.last
    return left is right or left is NOTHING or right is EVERYTHING


@given(demands, demands)
def test_join_is_commutative(a: Demand, b: Demand) -> None:
    assert equal(join(a, b), join(b, a))


@given(demands, demands, demands)
def test_join_is_associative(a: Demand, b: Demand, c: Demand) -> None:
    assert equal(join(join(a, b), c), join(a, join(b, c)))


@given(demands)
def test_join_is_idempotent(a: Demand) -> None:
    assert equal(join(a, a), a)
    assert equal(join(a, NOTHING), a)
    assert join(a, EVERYTHING) is EVERYTHING


@given(demands, demands, demands)
def test_join_is_the_least_upper_bound(a: Demand, b: Demand, c: Demand) -> None:
    joined = join(a, b)
    assert below(a, joined)
    assert below(b, joined)
    if below(a, c) and below(b, c):
        assert below(joined, c)


@given(demands, demands, demands)
def test_join_is_monotone(a: Demand, b: Demand, c: Demand) -> None:
    if below(a, b):
        assert below(join(a, c), join(b, c))


@given(rows, st.integers(0, 3))
def test_rows_on_another_dimension_keep_their_number(some: Rows, dim: int) -> None:
    moved = some.at(dim)
    assert (moved.dim, moved.last, moved.blocks) == (dim, some.last, some.blocks)


@pytest.mark.parametrize(
    ("some", "whole"),
    [
        (Rows(1, 6), True),
        (Rows(1, 5), False),
        (Rows(0, 3, 2), False),
        (Rows(1, 3, 2), True),
        (Rows(1, 2, 2), False),
        (Rows(1, 1, 6), True),
        (Rows(0, 1), False),
    ],
)
def test_covers(some: Rows, whole: bool) -> None:
    assert covers(some, torch.empty(2, 6)) is whole


def test_symbolic_sizes_are_compared_without_guards() -> None:
    mode = fake_mode()
    value = fake(mode, torch.empty(5, 7), "x", [0, 1])
    batch, length = value.shape
    assert same(length, length)
    assert not same(length, 7)  # it was traced with 7, and may be another
    assert not same(batch, length)
    assert at_least(length + 3, length)
    assert not at_least(length, 7)
    assert not covers(Rows(1, 7), value)
    assert covers(Rows(0, 1, batch), value)
    assert join(Rows(0, 1, batch), Rows(0, 2, length)) is EVERYTHING
    assert equal(join(Rows(0, 1, batch), Rows(0, 1, 5)), EVERYTHING)
    joined = join(Rows(0, 1, batch), Rows(0, 2, batch))
    assert isinstance(joined, Rows)
    assert joined.last == 2
    assert mode.shape_env is not None
    assert not mode.shape_env.guards


def test_rows_say_what_they_are() -> None:
    assert str(Rows(1, 3)) == "last 3 of dim 1"
    assert str(Rows(0, 3, 2)) == "last 3 of dim 0 in each of 2 blocks"
    assert repr(EVERYTHING) == "EVERYTHING"
