from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.recurrences import checks
from tests.recurrences.checks import Arguments, Case

CHANNELS = 6


def draw(batch: int, rows: int, with_state: bool, dtype: torch.dtype) -> Arguments:
    state = torch.stack([torch.randn(batch, CHANNELS), torch.rand(batch, CHANNELS) + 0.1, torch.randn(batch, CHANNELS)])
    return {
        "time_decay": torch.randn(CHANNELS),
        "time_first": torch.randn(CHANNELS),
        "key": (3 * torch.randn(batch, rows, CHANNELS)).to(dtype),
        "value": torch.randn(batch, rows, CHANNELS).to(dtype),
        "initial_state": state if with_state else None,
        "outputs": -1,
    }


def loop(given: Arguments) -> tuple[Tensor, Tensor]:
    """The sums themselves; float64 holds their exponents."""
    key, value, rate, bonus = given["key"], given["value"], given["time_decay"].exp(), given["time_first"]
    a, b, most = torch.zeros(3, *key[:, 0].shape, dtype=key.dtype)
    if given["initial_state"] is None:
        most = most - 1e38
    else:
        a, b, most = given["initial_state"]
        a, b = a * most.exp(), b * most.exp()
    outputs = []
    for t in range(key.shape[1]):
        new = (key[:, t] + bonus).exp()
        outputs.append((a + new * value[:, t]) / (b + new))
        new = key[:, t].exp()
        a, b = (-rate).exp() * a + new * value[:, t], (-rate).exp() * b + new
        most = torch.maximum(most - rate, key[:, t])
    return torch.stack(outputs, 1), torch.stack([a / most.exp(), b / most.exp(), most])


CASE = Case("wkv", draw, loop)


@pytest.fixture(name="case")
def _case() -> Case:
    return CASE


class TestOperator(checks.ElementwiseTests):
    pass


def test_large_keys_do_not_overflow():
    arguments = draw(2, 100, False, torch.float32)
    arguments["key"] = arguments["key"] * 60
    outputs, state = CASE.run(arguments)
    assert outputs.isfinite().all()
    assert state.isfinite().all()
    shifted, _ = CASE.run(arguments | {"key": arguments["key"] + 64})
    checks.close(shifted, outputs, 1e-4)
