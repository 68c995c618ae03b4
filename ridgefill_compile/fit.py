"""From sums to maps: solve every penalty, score it on held-out rows, keep the best; then look at the first rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

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
    return SplitMaps.made_of(
        sums.split,
        maps,
        penalty=best,
        rows=sums.rows,
        held_out=tried[best],
        penalty_cosines=mean,
        widths=widths,
        first_rows=FIRST_ROWS if starts and first_rows_fail(maps, rows[sums.split], rows, starts) else 0,
    )


def first_rows_fail(
    maps: Mapping[int, StoredMap], x: Tensor, rows: Mapping[int, Tensor], starts: Sequence[int]
) -> bool:
    """Whether the row that begins a text is a sink that no map predicts: far longer in the late layers than other rows
    are, but not yet recognisable at the split. Every later row attends to it, so it has to be exact.
    """
    start = torch.zeros(len(x), dtype=torch.bool)
    start[list(starts)] = True
    longer, cosines = 0.0, []
    for layer, stored in maps.items():
        matrix, offset = stored.floats().float(), stored.offset.float()
        y = rows[layer][:, -len(offset) :]
        before_projections = rows[layer].shape[1] - len(offset)
        length = torch.linalg.vector_norm(rows[layer][:, :before_projections] if before_projections else y, dim=1)
        longer = max(longer, float(length[start].median() / length[~start].median()))
        cosine = F.cosine_similarity(x[:, : matrix.shape[1]] @ matrix.T + offset, y, dim=1)
        cosines.append(torch.stack([cosine[start].mean(), cosine[~start].mean()]))
    first, others = torch.stack(cosines).median(0).values.tolist()
    return bool(longer > SINK and first < min(others, WELL_PREDICTED))


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
