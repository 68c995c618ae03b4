"""Which rows of a value somebody reads: the lattice that dead-row elimination works on.

    NOTHING  <  Rows(dim, last=1)  <  ...  <  Rows(dim, last=T)  <  Rows(dim, last=T, selected)  <  EVERYTHING

`Rows` says nothing of prompts, batches or layers. It is a plain statement about one tensor: of dimension `dim`, only
the last `last` entries are read. So no rule needs to know what a dimension *means*: the same size N may be query rows
in one value and keys in the next, and the two never get mixed up, because a demand only moves through an op by the
op's own arithmetic.

`blocks` covers flattened batches. A value of shape [B * N, d] holds B blocks of N rows; `Rows(0, last=T, blocks=B)`
reads the last T entries of each block.

`selected` adds entries that are known when the graph runs: those at the positions of an index, all of them before the
last T. Computed on these rows, a value holds the selected ones first, in ascending order, then the last ones: so the
last rows of what was computed are the last rows of the whole.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

IntLike = int | torch.SymInt


class Bound(enum.Enum):
    """The two ends of the lattice."""

    NOTHING = "nothing"
    EVERYTHING = "everything"

    def __repr__(self) -> str:
        return self.name


NOTHING = Bound.NOTHING
EVERYTHING = Bound.EVERYTHING


BLOCKS = "blocks"


@dataclass(frozen=True, eq=False)
class Selected:
    """Rows that are selected when the graph runs.

    Attributes:
        index: the node that holds their positions, int64, ascending: [count] or, of each sequence, [batch, count].
        count: how many they are.
        batch: the dimension of the value that counts sequences (negative: one that it lacks, in front); BLOCKS: they
            are the blocks of the rows' own dimension; None: the index is one for all.
        each: how many neighbouring entries of the value a position stands for.
        spread: the value is the same for every sequence, so it cannot be computed on each one's rows: it is computed
            whole, and spread over the sequences when its rows are taken.
    """

    index: Node
    count: IntLike
    batch: int | str | None = None
    each: int = 1
    spread: bool = False


@dataclass(frozen=True, eq=False)  # comparing symbolic sizes with == would add guards
class Rows:
    """The last `last` entries of each of `blocks` equal blocks of dimension `dim` (counted from 0), and `selected`."""

    dim: int
    last: int
    blocks: IntLike = 1
    selected: Selected | None = None

    def __repr__(self) -> str:
        inside = "" if same(self.blocks, 1) else f" in each of {self.blocks} blocks"
        chosen = "" if self.selected is None else f"{self.selected.count} selected and the "
        return f"{chosen}last {self.last} of dim {self.dim}{inside}"

    def at(self, dim: int) -> Rows:
        """The same rows, found on another dimension."""
        return replace(self, dim=dim)

    @property
    def length(self) -> IntLike:
        """How many entries of each block they are."""
        return self.last if self.selected is None else self.selected.count * self.selected.each + self.last


Demand = Bound | Rows


def same(left: IntLike, right: IntLike) -> bool:
    """Whether two sizes are equal whatever the symbols stand for. Adds no guard."""
    return left is right or bool(statically_known_true(left == right))


def at_least(left: IntLike, right: IntLike) -> bool:
    """Whether `left >= right` whatever the symbols stand for. Adds no guard."""
    return bool(statically_known_true(left >= right))


def plain(size: IntLike) -> int | None:
    """The number a size is whatever the symbols stand for, if it is one. Adds no guard."""
    if isinstance(size, int):
        return size
    expression = size.node.shape_env.simplify(size.node.expr)
    return int(expression) if expression.is_Integer else None


def at_most(size: IntLike) -> int | None:
    """A plain number that `size` is known not to exceed, if there is one. Adds no guard."""
    if isinstance(size, int):
        return size
    upper = size.node.shape_env.bound_sympy(size.node.expr).upper
    return int(upper) if upper.is_Integer else None


def join(left: Demand, right: Demand) -> Demand:
    """The least demand that covers both. Rows on two different dimensions have no common form but EVERYTHING."""
    if left is NOTHING:
        return right
    if right is NOTHING or left is EVERYTHING:
        return left
    if right is EVERYTHING:
        return right
    assert isinstance(left, Rows) and isinstance(right, Rows)
    if left.dim != right.dim or not same(left.blocks, right.blocks):
        return EVERYTHING
    if same_selection(left.selected, right.selected):
        return left if left.last >= right.last else right
    if left.selected is not None and right.selected is not None:
        return EVERYTHING
    more, less = (left, right) if right.selected is None else (right, left)
    return more if less.last <= more.last else EVERYTHING


def same_selection(left: Selected | None, right: Selected | None) -> bool:
    """Whether two rows select alike."""
    if left is None or right is None:
        return left is right
    return left.index is right.index and (left.batch, left.each) == (right.batch, right.each)


def same_rows(left: Rows, right: Rows) -> bool:
    """Whether two demands on one value are for the same rows."""
    return left.last == right.last and same_selection(left.selected, right.selected)


def covers(demand: Rows, value: torch.Tensor) -> bool:
    """Whether these rows are known to be the whole value."""
    return same(value.shape[demand.dim], demand.blocks * demand.length)
