from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ridgefill_compile.recurrences import selective_scan as module
from ridgefill_compile.recurrences.selective_scan import linear_scan
from tests.recurrences import checks
from tests.recurrences.checks import Arguments, Case, close

CHANNELS, ENTRIES = 6, 4


def draw(batch: int, rows: int, with_state: bool, dtype: torch.dtype) -> Arguments:
    return {
        "x": torch.randn(batch, CHANNELS, rows).to(dtype),
        "dt": torch.rand(batch, CHANNELS, rows).to(dtype),
        "A": -4 * torch.rand(CHANNELS, ENTRIES),
        "B": torch.randn(batch, ENTRIES, rows).to(dtype),
        "C": torch.randn(batch, ENTRIES, rows).to(dtype),
        "initial_state": torch.randn(batch, CHANNELS, ENTRIES) if with_state else None,
    }


def loop(given: Arguments) -> tuple[Tensor, Tensor]:
    x, dt, A, B, C = (given[name] for name in ("x", "dt", "A", "B", "C"))
    state = given["initial_state"]
    state = x.new_zeros(len(x), CHANNELS, ENTRIES) if state is None else state
    outputs = []
    for t in range(x.shape[2]):
        step = dt[:, :, t, None]
        state = (step * A).exp() * state + step * x[:, :, t, None] * B[:, None, :, t]
        outputs.append((state * C[:, None, :, t]).sum(-1))
    return torch.stack(outputs, 2), state


CASE = Case("selective_scan", draw, loop)


@pytest.fixture(params=[1, 7, 2**20], ids="budget={}".format, autouse=True)
def _budget(request, monkeypatch):
    """Row by row, a few rows at once, and all of them."""
    monkeypatch.setitem(module._BUDGET, "cpu", request.param * 2 * CHANNELS * ENTRIES)


@pytest.fixture(name="case")
def _case() -> Case:
    return CASE


class TestOperator(checks.ElementwiseTests):
    pass


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 40, 131])
def test_stretches_side_by_side_are_the_scan(rows):
    """What a GPU runs."""
    decays, added, state = torch.rand(rows, 3, 5), torch.randn(rows, 3, 5), torch.randn(3, 5)
    expected = linear_scan(decays.double(), added.double(), state.double(), 1)
    close(linear_scan(decays.clone(), added.clone(), state, 8), expected)


def test_steep_decay_stays_finite():
    arguments = draw(1, 100, True, torch.float32)
    arguments["A"] = arguments["A"] * 1000
    for actual, expected in zip(CASE.run(arguments), loop(checks.doubled(arguments)), strict=True):
        close(actual, expected, 1e-4)
