from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ridgefill_compile.recurrences.delta_rule import channel_products, inverse_of_unit_lower
from tests.recurrences import checks
from tests.recurrences.checks import Arguments, Case, close

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 4, 8, 12


def drawer(channels: bool, normalise: bool):
    def draw(batch: int, rows: int, with_state: bool, dtype: torch.dtype) -> Arguments:
        size = 1.0 if normalise else 0.3
        g = -3 * torch.rand(batch, rows, HEADS, *([KEY_DIM] if channels else []))
        return {
            "query": torch.randn(batch, rows, KEY_HEADS, KEY_DIM).to(dtype),
            "key": (size * torch.randn(batch, rows, KEY_HEADS, KEY_DIM)).to(dtype),
            "value": torch.randn(batch, rows, HEADS, VALUE_DIM).to(dtype),
            "g": g,
            "beta": torch.rand(batch, rows, HEADS).to(dtype),
            "initial_state": torch.randn(batch, HEADS, KEY_DIM, VALUE_DIM) if with_state else None,
            "scale": 0.7,
            "normalise": normalise,
        }

    return draw


def loop(given: Arguments) -> tuple[Tensor, Tensor]:
    query, key, value, g, beta = (given[name] for name in ("query", "key", "value", "g", "beta"))
    if given["normalise"]:
        query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    query, key = (x.repeat_interleave(value.shape[2] // key.shape[2], 2) for x in (query, key))
    g = g.unsqueeze(-1) if g.dim() == 3 else g
    state = given["initial_state"]
    if state is None:
        state = key.new_zeros(key.shape[0], value.shape[2], key.shape[3], value.shape[3])
    outputs = []
    for t in range(key.shape[1]):
        state = state * g[:, t].exp().unsqueeze(-1)
        missed = value[:, t] - torch.einsum("bhk,bhkv->bhv", key[:, t], state)
        state = state + torch.einsum("bh,bhk,bhv->bhkv", beta[:, t], key[:, t], missed)
        outputs.append(given["scale"] * torch.einsum("bhk,bhkv->bhv", query[:, t], state))
    return torch.stack(outputs, 1), state


CASES = {
    f"{'channel' if channels else 'head'}{'-unit' if normalise else ''}": Case(
        "gated_delta_rule", drawer(channels, normalise), loop
    )
    for channels in (False, True)
    for normalise in (False, True)
}


@pytest.fixture(params=CASES, name="case")
def _case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


class TestOperator(checks.TiledTests):
    pass


def test_steep_decay_neither_overflows_nor_is_lost():
    """e^-100 a row: beyond fp32's range after one row, so only what is never inverted stays finite.

    Running sums of thousands are rounded to 1e-4 of a logarithm, here as in the models' own functions.
    """
    for channels in (False, True):
        arguments = drawer(channels, True)(1, 130, True, torch.float32)
        arguments["g"] = torch.where(torch.rand_like(arguments["g"]) < 0.5, -100.0, -0.01)
        case = Case("gated_delta_rule", drawer(channels, True), loop)
        for actual, expected in zip(case.run(arguments), loop(checks.doubled(arguments)), strict=True):
            close(actual, expected, 1e-3)


def test_inverse_of_equal_keys_does_not_blow_up():
    """All keys equal and rate 1: the inverse is bidiagonal, while powers of the matrix reach 1e18."""
    strict = torch.ones(64, 64).tril(-1)
    close(inverse_of_unit_lower(strict), torch.linalg.inv(strict.double() + torch.eye(64)))
    odd = 0.3 * torch.randn(3, 37, 37).tril(-1)
    close(inverse_of_unit_lower(odd), torch.linalg.inv(odd.double() + torch.eye(37)))


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 37, 64])
def test_channel_products(rows):
    lefts, right = [torch.randn(3, rows, 5), torch.randn(3, rows, 5)], torch.randn(3, rows, 5)
    total = -torch.rand(3, rows, 5).cumsum(1) * 20
    between = (total.double().unsqueeze(-2) - total.double().unsqueeze(-3)).exp()
    for left, result in zip(lefts, channel_products(lefts, right, total), strict=True):
        close(result, torch.einsum("bid,bjd,bijd->bij", left.double(), right.double(), between).tril())
