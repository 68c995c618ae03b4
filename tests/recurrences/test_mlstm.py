from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.recurrences import checks
from tests.recurrences.checks import Arguments, Case

HEADS, KEY_DIM, VALUE_DIM = 3, 5, 6


def draw(batch: int, rows: int, with_state: bool, dtype: torch.dtype) -> Arguments:
    return {
        "query": torch.randn(batch, rows, HEADS, KEY_DIM).to(dtype),
        "key": torch.randn(batch, rows, HEADS, KEY_DIM).to(dtype),
        "value": torch.randn(batch, rows, HEADS, VALUE_DIM).to(dtype),
        "igate": (torch.randn(batch, rows, HEADS) - 1).to(dtype),  # larger, some denominators cancel out
        "fgate": (3 + 2 * torch.randn(batch, rows, HEADS)).to(dtype),
        "memory": torch.randn(batch, HEADS, KEY_DIM, VALUE_DIM) if with_state else None,
        "normaliser": torch.randn(batch, HEADS, KEY_DIM) if with_state else None,
        "level": torch.randn(batch, HEADS, 1) if with_state else None,
        "scale": 0.4,
        "eps": 1e-3,
    }


def loop(given: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The definition, row by row."""
    query, key, value, (batch, rows) = given["query"], given["key"], given["value"], given["key"].shape[:2]
    sizes = {"memory": (KEY_DIM, VALUE_DIM), "normaliser": (KEY_DIM,), "level": (1,)}
    memory, normaliser, level = (
        value.new_zeros(batch, HEADS, *size) if given[name] is None else given[name] for name, size in sizes.items()
    )
    outputs = []
    for t in range(rows):
        gain, forget = given["igate"][:, t, :, None], F.logsigmoid(given["fgate"][:, t, :, None])
        before, level = level, torch.maximum(forget + level, gain)
        kept, new = (forget + before - level).exp(), (gain - level).exp()
        memory = kept.unsqueeze(-1) * memory + (new * key[:, t]).unsqueeze(-1) * value[:, t].unsqueeze(-2)
        normaliser = kept * normaliser + new * key[:, t]
        scaled = query[:, t] * given["scale"]
        length = (scaled * normaliser).sum(-1, keepdim=True).abs()
        read = torch.einsum("bhk,bhkv->bhv", scaled, memory)
        outputs.append(read / (torch.maximum(length, (-level).exp()) + given["eps"]))
    return torch.stack(outputs, 1), memory, normaliser, level


CASE = Case("mlstm", draw, loop)


@pytest.fixture(name="case")
def _case() -> Case:
    return CASE


class TestOperator(checks.TiledTests):
    pass


@pytest.mark.parametrize(("gain", "forget"), [(90.0, 5.0), (-90.0, 5.0), (300.0, -100.0), (-300.0, -100.0)])
def test_extreme_gates_do_not_overflow(gain: float, forget: float) -> None:
    arguments = draw(1, 130, True, torch.float32)
    arguments["igate"] = torch.where(torch.rand_like(arguments["igate"]) < 0.5, gain, arguments["igate"])
    arguments["fgate"] = torch.where(torch.rand_like(arguments["fgate"]) < 0.5, forget, arguments["fgate"])
    for actual, expected in zip(CASE.run(arguments), loop(checks.doubled(arguments)), strict=True):
        assert actual.isfinite().all()
        checks.close(actual, expected, 1e-2)  # the sum of a tile's forget gates is in the thousands


def test_a_prompt_goes_on_from_the_state_of_the_one_before() -> None:
    arguments = draw(2, 150, False, torch.float32)
    whole, *final = CASE.run(arguments)
    rows = ("query", "key", "value", "igate", "fgate")
    first, *state = CASE.run(arguments | {name: arguments[name][:, :70] for name in rows})
    entering = dict(zip(("memory", "normaliser", "level"), state, strict=True))
    second, *end = CASE.run(arguments | {name: arguments[name][:, 70:] for name in rows} | entering)
    for actual, expected in zip((torch.cat([first, second], 1), *end), (whole, *final), strict=True):
        checks.close(actual, expected)
