"""Rows of a recurrence, in tiles: what is shared by the scans that loop over tiles of rows.

Inside a tile everything is matrix products; only the state goes from tile to tile. Tiles are 64 rows, which balances
the products inside a tile (they grow with its rows) against those with the state (they do not). What is computed does
not depend on the tile, only its rounding does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
TILE = 64
_BUDGET = {"cpu": 2**20}  # floats per operand of a stretch; else
_DEFAULT_BUDGET = 2**26


def without_autocast(scan: Callable[P, R]) -> Callable[P, R]:
    """The same function, computed in the dtypes that it names, wherever it is called."""

    @functools.wraps(scan)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        device = next(value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        with torch.autocast(device.type, enabled=False):
            return scan(*args, **kwargs)

    return run


def check_rows(*values: Tensor) -> None:
    """Of values `[B, N, ..]`, whether batch and rows agree.

    Raises:
        ValueError: they do not.
    """
    if len({value.shape[:2] for value in values}) > 1:
        sizes = ", ".join(str(list(value.shape)) for value in values)
        raise ValueError(f"a recurrence needs values of the same batch and rows, not {sizes}")


def state_only_rows(rows: int, outputs: int) -> int:
    """First rows that only the state needs, whole tiles of them, if the last `outputs` of `rows` are to be put out."""
    return rows if outputs == 0 else (rows - outputs) // TILE * TILE


def behind_zeros(query: Tensor, rows: int) -> Tensor:
    """Queries `[B, T, H, K]` behind so many rows of zeros (none if negative), whose outputs nobody asks for."""
    return F.pad(query, (0, 0, 0, 0, rows, 0)) if rows > 0 else query


def spans(start: int, stop: int, floats_per_row: int, device: torch.device) -> Iterator[tuple[int, int, int]]:
    """Stretches of rows to prepare at once: (first, last + 1, rows a tile), a rest of less than a tile by itself.

    On a CPU a stretch is what fits its caches; on a GPU it is long, so that kernels are few. So memory does not grow
    with the length.
    """
    budget = _BUDGET.get(device.type, _DEFAULT_BUDGET)
    step = max(1, budget // (floats_per_row * TILE)) * TILE
    whole = start + (stop - start) // TILE * TILE
    for first in range(start, whole, step):
        yield first, min(first + step, whole), TILE
    if whole < stop:
        yield whole, stop, stop - whole


def in_tiles(rows: Tensor, tile: int) -> Tensor:
    """`[B, N, H, ...]` as `[N / tile, B * H, tile, ...]` in fp32, contiguous: each tile a batch of matrices."""
    batch, heads, rest = rows.shape[0], rows.shape[2], rows.shape[3:]
    apart: Tensor = rows.unflatten(1, (-1, tile)).movedim((1, 0, 3, 2), (0, 1, 2, 3))
    return apart.to(torch.float32).reshape(-1, batch * heads, tile, *rest)


def in_rows(tiles: Tensor, batch: int) -> Tensor:
    """The inverse: `[n, B * H, C, ...]` as `[B, n C, H, ...]`."""
    rows: Tensor = tiles.unflatten(1, (batch, -1)).movedim((1, 0, 3, 2), (0, 1, 2, 3)).flatten(1, 2)
    return rows


def put(outputs: Tensor, first: int, rows: Tensor) -> None:
    """Write rows `[B, n, ...]` to `outputs[:, first : first + n]`; those before row 0 drop out."""
    skip = max(0, -first)
    outputs[:, first + skip : first + rows.shape[1]] = rows[:, skip:]
