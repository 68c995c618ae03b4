"""Rows that are selected when the graph runs: taken out of a value, and put back into one.

Plain functions of tensors, called by graphs as if they were ops. `index` holds positions, ascending: [count], the same
ones in every sequence, or [batch, count]. It may lie on another device: a model may be spread over several.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def take_rows(value: Tensor, index: Tensor, dim: int, batch: int | None = None) -> Tensor:
    """Rows of a value at the positions of an index: a new tensor, `index.shape[-1]` long in dimension `dim`.

    `batch`: the dimension that counts sequences, where each has positions of its own. Of size 1, the value is the same
    for all of them; negative, it lacks the dimension, and gets it in front.
    """
    index = index.to(value.device)
    if batch is None:
        return value.index_select(dim, index)
    while batch < 0:
        value, batch, dim = value.unsqueeze(0), batch + 1, dim + 1
    sizes = list(value.shape)
    sizes[batch] = index.shape[0]
    return value.expand(sizes).gather(dim, _shown(index, sizes, dim, batch))


def put_rows(value: Tensor, index: Tensor, rows: Tensor, dim: int, batch: int | None = None) -> Tensor:
    """The value with rows at the positions of an index replaced: what `take_rows` takes, put back."""
    index = index.to(value.device)
    if batch is None:
        return value.index_copy(dim, index, rows)
    return value.scatter(dim, _shown(index, list(rows.shape), dim, batch), rows)


def take_entries(value: Tensor, index: Tensor, dim: int, each: int = 1, batch: int | None = None) -> Tensor:
    """Rows of a value whose dimension `dim` holds several things in memory order: sequences (one for each row of the
    index, where `batch` is `dim`), positions in them, `each` neighbouring entries of a position.

        [B * N * each, d]  ->  [B * count * each, d]
    """
    sequences = index.shape[0] if batch == dim else 1
    apart = value.unflatten(dim, (sequences, value.shape[dim] // (sequences * each), each))
    taken = take_rows(apart, index, dim + 1, batch if batch is None or batch <= dim else batch + 2)
    inserted = 0 if batch is None else max(0, -batch)
    return taken.flatten(dim + inserted, dim + inserted + 2)


def spread_rows(rows: Tensor, index: Tensor, like: Tensor, dim: int, last: int, batch: int | None = None) -> Tensor:
    """Selected and last rows in their places among the rows of another value, and zeros at all others."""
    sizes = list(rows.shape)
    sizes[dim] = like.shape[dim]
    return put_rows(rows.new_zeros(sizes), with_last(index, like.shape[dim], last), rows, dim, batch)


def with_last(index: Tensor, length: int, last: int) -> Tensor:
    """An index that also holds the last `last` positions of `length`."""
    rest = torch.arange(length - last, length, device=index.device)
    return torch.cat([index, rest.expand(*index.shape[:-1], last)], -1)


def _shown(index: Tensor, sizes: list[Any], dim: int, batch: int) -> Tensor:
    """An index [batch, count] in the shape of what it takes."""
    positions = index if batch < dim else index.t()
    alone = [1] * len(sizes)
    alone[batch], alone[dim] = index.shape[0], index.shape[1]
    return positions.reshape(alone).expand([*sizes[:dim], index.shape[1], *sizes[dim + 1 :]])
