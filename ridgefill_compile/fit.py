"""From sums to maps: solve every penalty, score it on held-out rows, keep the best; then look at the first rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgefill_compile.errors import RidgefillWarning
from ridgefill_compile.ridge import RidgeSolver, RidgeStatistics
from ridgefill_compile.splitmaps import SplitMaps, StoredMap, storage_dtype

FIRST_ROWS = 4
"""Rows kept exact where the first one is a sink: a text that begins with one token, and again with it, has more."""
WELL_PREDICTED = 0.95
"""A cosine that is good enough for a sink."""
SINK = 10.0
"""How many times the median length a sink has. Those seen in trained models have a hundred times and more."""


def fit_split(
    sums: RidgeStatistics,
    rows: Mapping[int, Tensor],
    penalties: Sequence[float],
    dtype: str,
    watch: Callable[[Sequence[int]], Iterable[int]] = iter,
    widths: Mapping[int, tuple[int, ...]] | None = None,
    starts: Sequence[int] = (),
) -> SplitMaps:
    """The maps of one split, at the penalty with the highest held-out cosine; of equal ones, the largest.

    Args:
        sums: what to fit.
        rows: layer -> its input on held-out rows and, where projections are predicted, behind it those side by side,
            `[rows, d]` float32; the split and each layer with sums.
        penalties: the grid of `λ` to try.
        dtype: of the stored maps, "bfloat16", "float32" or "int8"; they are scored as stored, not as solved.
        watch: passes the layers on, one at a time, to whoever shows progress.
        widths: layer -> the widths of its projections; None: its input is predicted.
        starts: where among the held-out rows those are that begin a text.

    Returns:
        Maps on the CPU, with the figures that `SplitMaps` describes.
    """
    solver = RidgeSolver(sums)
    widths = {layer: widths[layer] for layer in sums.layers} if widths else {}
    x = rows[sums.split][:, : sums.sum_x.shape[0]].to(sums.xx.device)
    tried: dict[float, dict[int, dict[str, float]]] = {penalty: {} for penalty in penalties}
    for layer in watch(sums.layers):
        y = rows[layer][:, -sums.sum_y[layer].shape[0] :].to(sums.xx.device)
        for penalty, figures in tried.items():
            figures[layer] = _figures(_stored(solver, layer, penalty, dtype), x, y, widths.get(layer))
    mean = {
        penalty: sum(figure["cosine"] for figure in figures.values()) / len(figures)
        for penalty, figures in tried.items()
    }
    best = max(mean, key=lambda penalty: (mean[penalty], penalty))
    maps = {layer: _stored(solver, layer, best, dtype).cpu() for layer in sums.layers}
    sinks = Sinks.of(maps, rows[sums.split], rows, starts)
    first_rows = FIRST_ROWS if starts and sinks.are_first_rows else 0
    if lost := sinks.elsewhere(first_rows):
        _warn_of_sinks(sums.split, lost, len(sinks.starts))
    return SplitMaps.made_of(
        sums.split,
        maps,
        penalty=best,
        rows=sums.rows,
        held_out=tried[best],
        penalty_cosines=mean,
        widths=widths,
        first_rows=first_rows,
    )


@dataclass(frozen=True)
class Sinks:
    """Held-out rows that are far longer in some late layer than rows mostly are, and how well they are predicted.

    Every later row may attend to such a row; where its prediction fails, it has to be exact.

    Attributes:
        lengths: of each row in each late layer, over the layer's median: `[layers, rows]`.
        cosines: of each row and its prediction: `[layers, rows]`.
        starts: rows that begin a text: bool `[rows]`.
    """

    lengths: Tensor
    cosines: Tensor
    starts: Tensor

    @classmethod
    def of(cls, maps: Mapping[int, StoredMap], x: Tensor, rows: Mapping[int, Tensor], starts: Sequence[int]) -> Sinks:
        """Of some maps, on the held-out rows of `fit_split`; `x`: those of the split state."""
        start = torch.zeros(len(x), dtype=torch.bool)
        start[list(starts)] = True
        lengths, cosines = [], []
        for layer, stored in maps.items():
            matrix, offset = stored.floats().float(), stored.offset.float()
            y = rows[layer][:, -len(offset) :]
            before_projections = rows[layer].shape[1] - len(offset)
            length = torch.linalg.vector_norm(rows[layer][:, :before_projections] if before_projections else y, dim=1)
            lengths.append(length / length[~start].median())
            cosines.append(F.cosine_similarity(x[:, : matrix.shape[1]] @ matrix.T + offset, y, dim=1))
        return cls(torch.stack(lengths), torch.stack(cosines), start)

    @property
    def are_first_rows(self) -> bool:
        """Whether the row that begins a text is one that no map predicts: not yet recognisable at the split."""
        longer = self.lengths[:, self.starts].median(1).values.max()
        first = self.cosines[:, self.starts].mean(1).median()
        others = self.cosines[:, ~self.starts].mean(1).median()
        return bool(longer > SINK and first < min(float(others), WELL_PREDICTED))

    def elsewhere(self, first_rows: int) -> int:
        """How many there are that no map predicts and that are not among the first rows of a text, which are exact."""
        exact = torch.zeros_like(self.starts)
        for behind in range(first_rows):
            exact[behind:] |= self.starts[: len(exact) - behind]
        lost = (self.lengths > SINK) & (self.cosines < WELL_PREDICTED)
        return int((lost.any(0) & ~exact).sum())


def _warn_of_sinks(split: int, lost: int, rows: int) -> None:
    warnings.warn(
        f"split {split}: {lost} of {rows} held-out rows behind the first ones of a text are over {SINK:.0f} times as "
        f"long as rows mostly are in some late layer, and its map misses them (cosine below {WELL_PREDICTED}); "
        "later rows may attend to them as they are, so compare the loss at this split and at a deeper one "
        "(ridgefill eval)",
        RidgefillWarning,
        stacklevel=4,
    )


def _stored(solver: RidgeSolver, layer: int, penalty: float, dtype: str) -> StoredMap:
    return StoredMap.of(*solver.solve(layer, penalty), storage_dtype(dtype))


def _figures(stored: StoredMap, x: Tensor, y: Tensor, widths: tuple[int, ...] | None) -> dict[str, float]:
    """How well a map predicts `y` `[rows, d_out]` from `x` `[rows, d_in]`, and how well `x` itself does; or how well
    it predicts each projection, and on average.
    """
    prediction = x @ stored.floats().float().T + stored.offset.float()
    if widths is not None:
        parts = zip(prediction.split(widths, 1), y.split(widths, 1), strict=True)
        each = [_agreement(*part) for part in parts]
        figures = {name: sum(part[name] for part in each) / len(each) for name in each[0]}
        return figures | {f"{name}.{cut}": value for cut, part in enumerate(each) for name, value in part.items()}
    figures = _agreement(prediction, y)
    if x.shape == y.shape:
        figures |= {f"identity_{name}": value for name, value in _agreement(x, y).items()}
    return figures


def _agreement(prediction: Tensor, truth: Tensor) -> dict[str, float]:
    error = torch.linalg.vector_norm(prediction - truth) / torch.linalg.vector_norm(truth)
    return {
        "cosine": float(F.cosine_similarity(prediction, truth, dim=1).mean()),
        "relative_error": float(error),
    }
