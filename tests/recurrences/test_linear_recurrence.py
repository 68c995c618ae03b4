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


@pytest.mark.parametrize("with_state", [False, True])
def test_every_length_equals_the_loop_over_rows(with_state):
    checks.check_lengths(CASE, with_state)


def test_fewer_outputs_are_the_last():
    checks.check_narrowed(CASE)


def test_low_precision():
    checks.check_half_precision(CASE)


def test_operands_are_left_alone():
    checks.check_operands_untouched(CASE)


def test_operator_is_sound():
    checks.check_operator(CASE)
    checks.check_symbolic_sizes(CASE)
