from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.recurrences import checks
from tests.recurrences.checks import Arguments, Case

CHANNELS = 6


def draw(batch: int, rows: int, with_state: bool, dtype: torch.dtype) -> Arguments:
    return {
        "x": torch.randn(batch, rows, CHANNELS).to(dtype),
        "decay": torch.rand(batch, rows, CHANNELS).to(dtype),
        "initial_state": torch.randn(batch, CHANNELS) if with_state else None,
        "outputs": -1,
    }


def loop(given: Arguments) -> tuple[Tensor, Tensor]:
    state = given["initial_state"]
    state = torch.zeros_like(given["x"][:, 0]) if state is None else state
    outputs = []
    for t in range(given["x"].shape[1]):
        state = given["decay"][:, t] * state + given["x"][:, t]
        outputs.append(state)
    return torch.stack(outputs, 1), state


CASE = Case("linear_recurrence", draw, loop)


@pytest.fixture(name="case")
def _case() -> Case:
    return CASE


class TestOperator(checks.OperatorTests):
    pass
