from __future__ import annotations

import pytest
import torch

from ridgefill_compile.recurrences import tiles
from ridgefill_compile.recurrences.tiles import TILE, in_rows, in_tiles, put, spans, state_only_rows


@pytest.mark.parametrize(("rows", "outputs", "expected"), [(200, 0, 200), (200, 200, 0), (200, 8, 192), (200, 9, 128)])
def test_rows_without_outputs_are_whole_tiles(rows, outputs, expected):
    assert state_only_rows(rows, outputs) == expected


@pytest.mark.parametrize("floats_per_row", [1, 100, 2**20])
@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 30), (0, 64), (64, 500), (128, 130)])
def test_stretches_cover_the_rows_once(start, stop, floats_per_row, monkeypatch):
    monkeypatch.setitem(tiles._BUDGET, "cpu", 2 * 100 * TILE)
    at = start
    for first, last, tile in spans(start, stop, floats_per_row, torch.device("cpu")):
        assert first == at < last
        assert (last - first) % tile == 0
        assert tile == TILE or last == stop
        at = last
    assert at == stop


def test_tiles_and_back():
    rows = torch.arange(2 * 12 * 3 * 5).reshape(2, 12, 3, 5)
    tiled = in_tiles(rows, 4)
    assert tiled.shape == (3, 6, 4, 5)
    assert torch.equal(tiled[1, 4], rows[1, 4:8, 1].float())
    assert torch.equal(in_rows(tiled, 2), rows.float())


def test_rows_before_the_first_drop_out():
    outputs = torch.zeros(1, 3, 1)
    put(outputs, -2, torch.tensor([[[1.0], [2.0], [3.0], [4.0]]]))
    assert outputs.flatten().tolist() == [3, 4, 0]
    put(outputs, 2, torch.tensor([[[5.0]]]))
    assert outputs.flatten().tolist() == [3, 4, 5]
