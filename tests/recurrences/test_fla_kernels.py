from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgefill_compile.recurrences import delta_rule, fla_kernels, linear_attention
from tests.recurrences.checks import close

GPU = pytest.mark.skipif(
    not (torch.cuda.is_available() and fla_kernels.are_installed()), reason="needs a GPU and flash-linear-attention"
)


def rule_by_row(q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    """What fla documents of its kernels: all operands of equal length, key heads shared by groups of value heads."""
    assert q.shape == k.shape
    assert q.dtype == k.dtype == v.dtype
    assert settings.pop("output_final_state")
    scale, state = settings.pop("scale"), settings.pop("initial_state")
    batch, rows, heads, width = v.shape
    if settings.pop("use_qk_l2norm_in_kernel"):
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    assert not settings
    q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    state = torch.zeros(batch, heads, k.shape[-1], width) if state is None else state.clone()
    assert state.dtype == torch.float32
    decay = g.exp() if g.dim() == 4 else g.exp().unsqueeze(-1)
    outputs = []
    for t in range(rows):
        state = state * decay[:, t].unsqueeze(-1)
        missed = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t].unsqueeze(-1) * missed)
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, 1), state


def attention_by_row(q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    """The same of linear attention, whose heads are not shared."""
    assert q.shape == k.shape
    assert q.shape[2] == v.shape[2]
    assert settings.pop("output_final_state")
    state = settings.pop("initial_state")
    assert settings == {"scale": 1.0}
    state = torch.zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1]) if state is None else state
    outputs = []
    for t in range(v.shape[1]):
        state = state * g[:, t, :, None, None].exp() + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, 1), state


@pytest.fixture(name="stand_in")
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules in the place of fla's, as documented, but for a CPU."""
    for name, kernel, function in (
        ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", rule_by_row),
        ("fla.ops.kda", "chunk_kda", rule_by_row),
        ("fla.ops.simple_gla", "chunk_simple_gla", attention_by_row),
    ):
        module = types.ModuleType(name)
        setattr(module, kernel, function)
        monkeypatch.setitem(sys.modules, name, module)


def delta_rule_arguments(device: str, channels: bool, wanted: int, with_state: bool, normalise: bool) -> list[Any]:
    torch.manual_seed(0)
    given = [
        torch.randn(2, wanted, 2, 16),
        torch.randn(2, 70, 2, 16) * (1 if normalise else 0.2),
        torch.randn(2, 70, 4, 32),
        -torch.rand(*((2, 70, 4, 16) if channels else (2, 70, 4))),
        torch.rand(2, 70, 4),
        torch.randn(2, 4, 16, 32) if with_state else None,
    ]
    return [*(x.to(device) if x is not None else None for x in given), 0.3, normalise]


def linear_attention_arguments(device: str, wanted: int, with_state: bool) -> list[Any]:
    torch.manual_seed(0)
    given = [
        torch.randn(2, wanted, 2, 16),
        torch.randn(2, 70, 2, 16),
        torch.randn(2, 70, 4, 32),
        -torch.rand(2, 70, 4),
        torch.randn(2, 4, 16, 32) if with_state else None,
    ]
    return [x.to(device) if x is not None else None for x in given]


@pytest.mark.parametrize("wanted", [70, 20, 0])
@pytest.mark.parametrize("with_state", [False, True])
class TestWhatIsPassed:
    """On a CPU: the kernels themselves are a stand-in."""

    @pytest.mark.parametrize("normalise", [False, True])
    @pytest.mark.parametrize("channels", [False, True])
    def test_delta_rule(self, stand_in, channels, wanted, with_state, normalise):
        given = delta_rule_arguments("cpu", channels, wanted, with_state, normalise)
        for actual, expected in zip(
            fla_kernels.gated_delta_rule(*given), delta_rule.gated_delta_rule(*given), strict=True
        ):
            same(actual, expected, 1e-5)

    def test_linear_attention(self, stand_in, wanted, with_state):
        given = linear_attention_arguments("cpu", wanted, with_state)
        for actual, expected in zip(
            fla_kernels.linear_attention(*given), linear_attention.linear_attention(*given), strict=True
        ):
            same(actual, expected, 1e-5)


@GPU
@pytest.mark.parametrize("wanted", [70, 20, 0])
class TestOnGpu:
    """The kernels, beside the operators in plain torch on a CPU; TF32 has ten bits."""

    @pytest.mark.parametrize("channels", [False, True])
    def test_delta_rule(self, channels, wanted):
        given = delta_rule_arguments("cpu", channels, wanted, True, True)
        on_gpu = delta_rule_arguments("cuda", channels, wanted, True, True)
        assert fla_kernels.serve(on_gpu[1])
        for actual, expected in zip(
            torch.ops.ridgefill.gated_delta_rule(*on_gpu), delta_rule.gated_delta_rule(*given), strict=True
        ):
            same(actual.cpu(), expected, 1e-2)

    def test_linear_attention(self, wanted):
        given, on_gpu = (linear_attention_arguments(device, wanted, True) for device in ("cpu", "cuda"))
        for actual, expected in zip(
            torch.ops.ridgefill.linear_attention(*on_gpu), linear_attention.linear_attention(*given), strict=True
        ):
            same(actual.cpu(), expected, 1e-2)


def same(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert actual.is_contiguous()
    if expected.numel():
        close(actual, expected, tolerance)


def test_a_cpu_runs_plain_torch():
    assert not fla_kernels.serve(torch.zeros(1, 2, 1, 4))


@pytest.mark.parametrize(("version", "usable"), [("0.5.2", False), ("0.6rc1", False), ("0.6.0", True), ("1.0b2", True)])
def test_versions(monkeypatch, version, usable):
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    fla_kernels.are_installed.cache_clear()
    assert fla_kernels.are_installed() is usable
    fla_kernels.are_installed.cache_clear()
