from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.recurrences import checks
from tests.recurrences.checks import Arguments, Case

HEADS, KEY_DIM, VALUE_DIM = 4, 5, 6


def drawer(groups: int):
    def draw(batch: int, rows: int, with_state: bool, dtype: torch.dtype) -> Arguments:
        return {
            "query": torch.randn(batch, rows, groups, KEY_DIM).to(dtype),
            "key": torch.randn(batch, rows, groups, KEY_DIM).to(dtype),
            "value": torch.randn(batch, rows, HEADS, VALUE_DIM).to(dtype),
            "g": -torch.rand(batch, rows, HEADS),
            "initial_state": torch.randn(batch, HEADS, KEY_DIM, VALUE_DIM) if with_state else None,
        }

    return draw


def loop(given: Arguments) -> tuple[Tensor, Tensor]:
    value, g, state = given["value"], given["g"], given["initial_state"]
    query, key = (given[name].repeat_interleave(HEADS // given[name].shape[2], 2) for name in ("query", "key"))
    state = value.new_zeros(len(value), HEADS, KEY_DIM, VALUE_DIM) if state is None else state
    outputs = []
    for t in range(value.shape[1]):
        state = g[:, t, :, None, None].exp() * state + key[:, t].unsqueeze(-1) * value[:, t].unsqueeze(-2)
        outputs.append(torch.einsum("bhk,bhkv->bhv", query[:, t], state))
    return torch.stack(outputs, 1), state


@pytest.fixture(params=[1, 2, 4], ids="groups={}".format, name="case")
def _case(request: pytest.FixtureRequest) -> Case:
    return Case("linear_attention", drawer(request.param), loop)


class TestOperator(checks.TiledTests):
    pass


def test_steep_decay_stays_finite(case):
    arguments = case.draw(1, 130, True, torch.float32)
    arguments["g"] = torch.where(torch.rand_like(arguments["g"]) < 0.5, -100.0, -0.01)
    for actual, expected in zip(case.run(arguments), loop(checks.doubled(arguments)), strict=True):
        checks.close(actual, expected, 1e-3)
