from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from ridgefill_compile.errors import RidgefillWarning
from ridgefill_compile.fit import FIRST_ROWS, fit_split
from ridgefill_compile.int8 import quantise
from ridgefill_compile.maps import RidgeMaps
from ridgefill_compile.ridge import RidgeSolver, RidgeStatistics

WIDTH, ROWS = 150, 600


@pytest.fixture(scope="module")
def rows() -> dict[int, Tensor]:
    """Layer -> input; linear in that of layer 1, up to a little noise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    true = {layer: torch.randn(WIDTH, WIDTH, generator=generator) for layer in (2, 3)}
    noise = 0.01 * torch.randn(ROWS, WIDTH, generator=generator)
    return {1: x} | {layer: x @ matrix.T + noise + layer for layer, matrix in true.items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_figures_are_of_the_maps_as_stored(rows, dtype):
    sums = RidgeStatistics.from_rows(1, rows[1], {layer: rows[layer] for layer in (2, 3)})
    maps = fit_split(sums, rows, [1e-9, 1.0], dtype)
    assert maps.dtype == getattr(torch, dtype)
    assert maps.penalty == 1e-9
    for layer in (2, 3):
        predicted = rows[1] @ maps.matrix(layer).float().T + maps.offsets[layer].float()
        error = (predicted - rows[layer]).norm() / rows[layer].norm()
        assert maps.held_out[layer]["relative_error"] == pytest.approx(error.item(), rel=1e-4)
        assert (error < 1e-3) == (dtype == "float32")


def test_int8_is_rounded_from_the_solution_itself(rows):
    sums = RidgeStatistics.from_rows(1, rows[1], {2: rows[2]})
    maps = fit_split(sums, rows, [0.01], "int8")
    matrix, offset = RidgeSolver(sums).solve(2, 0.01)
    codes, scales = quantise(matrix)
    assert torch.equal(maps.matrices[2], codes)
    assert torch.equal(maps.scales[2], scales)
    assert torch.equal(maps.offsets[2], offset.bfloat16())


class TestFirstRows:
    """The row that begins a text, made 100 times as long from layer 2 on."""

    STARTS = (0, 200, 400)

    def maps(self, rows, *, visible: bool, length: float = 100.0, starts=STARTS, sinks=STARTS):
        """Maps of rows of which some begin a text; `visible`: the split state tells them from the others."""
        rows = {layer: value.clone() for layer, value in rows.items()}
        for start in sinks:
            if visible:
                rows[1][start] = 1000 * torch.ones(WIDTH)
            for layer in (2, 3):
                direction = torch.linspace(-1, 1, WIDTH) ** 3
                rows[layer][start] = length * rows[layer].norm(dim=1).median() * direction / direction.norm()
        sums = RidgeStatistics.from_rows(1, rows[1], {layer: rows[layer] for layer in (2, 3)})
        return fit_split(sums, rows, [1e-6], "float32", starts=starts)

    def test_a_sink_that_the_split_state_does_not_show_is_kept_exact(self, rows):
        assert self.maps(rows, visible=False).first_rows == FIRST_ROWS

    def test_one_that_it_shows_is_predicted(self, rows):
        assert self.maps(rows, visible=True).first_rows == 0

    def test_rows_of_common_length_are_no_sinks(self, rows):
        assert self.maps(rows, visible=False, length=1.0).first_rows == 0

    def test_nothing_is_kept_where_no_row_begins_a_text(self, rows):
        sums = RidgeStatistics.from_rows(1, rows[1], {2: rows[2]})
        assert fit_split(sums, rows, [1e-6], "float32").first_rows == 0

    def test_sinks_elsewhere_are_told(self, rows):
        with pytest.warns(RidgefillWarning, match="split 1: 2 of 600 held-out rows behind the first ones"):
            self.maps(rows, visible=False, starts=(200,))
        with pytest.warns(RidgefillWarning, match="split 1: 3 of 600"):  # its first rows are no sinks: none is exact
            self.maps(rows, visible=False, starts=(300,))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.maps(rows, visible=True, starts=(300,))
            self.maps(rows, visible=False, sinks=(*self.STARTS, 3, 201))  # among the rows that are kept

    def test_it_is_stored_with_the_maps(self, rows, tmp_path):
        maps = RidgeMaps([self.maps(rows, visible=False)], layer_count=4)
        maps.save(tmp_path)
        assert RidgeMaps.load(tmp_path).first_rows == RidgeMaps.load(tmp_path).to("int8").first_rows == FIRST_ROWS
