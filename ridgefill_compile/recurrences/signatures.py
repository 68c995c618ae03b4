"""Functions of modelling files, by their parameters, and the operator that computes the same.

Recognised is a function that has the parameters of one of `SIGNATURES` and no unknown ones. That is a reason to try;
whether it is the same function is decided by its results on `samples` (see `substitute`).
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgefill_compile.recurrences import table  # noqa: F401  (registers the operators)

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Signature:
    """What a function to be substituted looks like.

    Attributes:
        operator: name of the operator.
        required: parameters it must have.
        known: further ones that it may have, beside `self` and `**kwargs` (which these functions ignore).
        rows: the argument whose rows tell how many there are, and the dimension they are in.
        compute: the same results by the operator, from all arguments by name. Dynamo traces it.
        samples: arguments to compare on. A sample marked optional may be refused by the function (with any error).
        stand_in: makes the `self` to compare on, of the class whose method it is; None where the method reads none.
        applies: whether the operator computes the same with these arguments; else the traced call is the model's own.
    """

    operator: str
    required: frozenset[str]
    known: frozenset[str]
    rows: tuple[str, int]
    compute: Callable[[Arguments], Any]
    samples: Callable[[], Iterator[tuple[Arguments, bool]]]
    stand_in: Callable[[type], Any] | None = None
    applies: Callable[[Arguments], bool] = lambda given: True


def gated_delta_rule(given: Arguments) -> tuple[Tensor, Tensor | None]:
    """Chunked gated delta rule; the query is scaled by `Dk ** -0.5`."""
    outputs, state = torch.ops.ridgefill.gated_delta_rule(
        given["query"],
        given["key"],
        given["value"],
        given["g"],
        given["beta"],
        given["initial_state"],
        given["query"].shape[-1] ** -0.5,
        given["use_qk_l2norm_in_kernel"],
    )
    return outputs, state if given["output_final_state"] else None


def selective_scan(given: Arguments) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba-1's scan from an empty state, with its step, skip and gate, which are elementwise."""
    x, dt = given["hidden_states"], given["dt"]
    if given["delta_bias"] is not None:
        dt = dt + given["delta_bias"].to(dt.dtype).unsqueeze(-1)
    if given["delta_softplus"]:
        dt = F.softplus(dt)
    outputs, state = torch.ops.ridgefill.selective_scan(x, dt, given["A"], given["B"], given["C"], None)
    if given["D"] is not None:
        outputs = outputs + x * given["D"].unsqueeze(-1)
    if given["z"] is not None:
        outputs = outputs * F.silu(given["z"])
    return (outputs, state) if given["return_last_state"] else outputs


def state_space_scan(given: Arguments) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba-2's scan: linear attention of C, B and the inputs of each step. Its state is [B, H, V, K]."""
    x, dt, low_high = given["hidden_states"].float(), given["dt"], given["dt_limit"]
    if given["dt_bias"] is not None:
        dt = dt + given["dt_bias"].to(dt.dtype)
    if given["dt_softplus"]:
        dt = F.softplus(dt)
    dt = torch.clamp(dt, min=low_high[0], max=low_high[1]).float()
    state = given["initial_states"].mT if given["initial_states"] is not None else None
    outputs, state = torch.ops.ridgefill.linear_attention(
        given["C"], given["B"], x * dt.unsqueeze(-1), given["A"].float() * dt, state
    )
    if given["D"] is not None:
        outputs = outputs + given["D"].unsqueeze(-1) * x
    return (outputs, state.mT.contiguous()) if given["return_final_states"] else outputs


def wkv(given: Arguments) -> tuple[Tensor, list[Tensor] | None]:
    """RWKV-4's average; the state is a list of numerator, denominator and maximum."""
    state = torch.stack([part.float() for part in given["state"]]) if given["state"] is not None else None
    outputs, final = torch.ops.ridgefill.wkv(
        given["time_decay"], given["time_first"], given["key"], given["value"], state, -1
    )
    wanted = given["return_state"] or given["state"] is not None
    return outputs, list(final.unbind()) if wanted else None


def linear_recurrence(given: Arguments) -> tuple[Tensor, Tensor]:
    """A gated linear recurrent unit's scan, which starts anew at every row that is a reset."""
    decay = given["recurrent_gate"] * ~given["reset"]
    state = given["recurrent_states"]
    outputs, final = torch.ops.ridgefill.linear_recurrence(given["hidden_states"], decay, state, -1)
    return outputs, final


def mlstm(given: Arguments) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """A matrix memory behind a configuration. Its rows are in dimension 2; the query is scaled by `K ** -0.5`."""
    rows = (given[name].transpose(1, 2) for name in ("query", "key", "value", "igate", "fgate"))
    states = (given[name] for name in ("c_initial", "n_initial", "m_initial"))
    scale, eps = given["query"].shape[-1] ** -0.5, given["self"].config.eps
    outputs, *final = torch.ops.ridgefill.mlstm(*rows, *states, scale, eps)
    return outputs.transpose(1, 2), tuple(final)


def _is_inference(given: Arguments) -> bool:
    """Whether states are kept in fp32, and returned: in training a configuration may say otherwise."""
    config = given["self"].config
    mode = config.mode if given["mode"] is None else given["mode"]
    return "train" not in mode and config.inference_state_dtype == "float32"


def _with_settings(kind: type) -> Any:
    """A module that computes by a configuration, with a small chunk and a large `eps`, so that it shows."""
    config = types.SimpleNamespace(
        mode="inference",
        chunk_size=32,
        eps=1e-2,
        return_last_states=True,
        autocast_kernel_dtype="float32",
        inference_state_dtype="float32",
    )
    return kind(config)


def _delta_rule_samples(channels: bool) -> Iterator[tuple[Arguments, bool]]:
    """Rows off the tile, with and without a state, with and without unit rows, in bf16; grouped heads where taken."""
    draw = _Draw()
    for rows, key_heads, with_state, dtype in (
        (70, 4, False, torch.float32),
        (131, 4, True, torch.float32),
        (70, 4, True, torch.bfloat16),
        (70, 2, True, torch.float32),
    ):
        arguments: Arguments = {
            "query": draw(2, rows, key_heads, 8, dtype=dtype),
            "key": draw(2, rows, key_heads, 8, dtype=dtype),
            "value": draw(2, rows, 4, 12, dtype=dtype),
            "g": -draw(*((2, rows, 4, 8) if channels else (2, rows, 4))).abs(),
            "beta": draw(2, rows, 4, dtype=dtype).sigmoid(),
            "initial_state": draw(2, 4, 8, 12) if with_state else None,
            "output_final_state": True,
            "use_qk_l2norm_in_kernel": True,
        }
        yield arguments, key_heads < 4
        if not with_state:  # unscaled rows grow; short ones do not
            short = {k: v * 0.3 if k in ("query", "key") else v for k, v in arguments.items()}
            yield short | {"use_qk_l2norm_in_kernel": False, "output_final_state": False}, False


def _selective_scan_samples() -> Iterator[tuple[Arguments, bool]]:
    draw = _Draw()
    for rows, everything, dtype in ((37, True, torch.float32), (70, False, torch.float32), (37, True, torch.bfloat16)):
        yield (
            {
                "hidden_states": draw(2, 6, rows, dtype=dtype),
                "dt": draw(2, 6, rows, dtype=dtype) if everything else draw(2, 6, rows).abs(),
                "A": -draw(6, 4).exp(),
                "B": draw(2, 4, rows, dtype=dtype),
                "C": draw(2, 4, rows, dtype=dtype),
                "D": draw(6) if everything else None,
                "z": draw(2, 6, rows, dtype=dtype) if everything else None,
                "delta_bias": draw(6) if everything else None,
                "delta_softplus": everything,
                "return_last_state": everything,
            },
            False,
        )


def _state_space_samples() -> Iterator[tuple[Arguments, bool]]:
    draw = _Draw()
    for rows, everything, dtype in (
        (70, False, torch.float32),
        (131, True, torch.float32),
        (70, True, torch.bfloat16),
    ):
        yield (
            {
                "hidden_states": draw(2, rows, 4, 6, dtype=dtype),
                "dt": draw(2, rows, 4, dtype=dtype) if everything else draw(2, rows, 4).abs(),
                "A": -draw(4).exp(),
                "B": draw(2, rows, 2, 5, dtype=dtype),
                "C": draw(2, rows, 2, 5, dtype=dtype),
                "chunk_size": 32,
                "D": draw(4) if everything else None,
                "dt_bias": draw(4) if everything else None,
                "initial_states": draw(2, 4, 6, 5) if everything else None,
                "dt_softplus": everything,
                "dt_limit": (0.1, 1.5) if everything else (0.0, float("inf")),
                "return_final_states": everything,
            },
            False,
        )


def _wkv_samples() -> Iterator[tuple[Arguments, bool]]:
    draw = _Draw()
    for rows, with_state, dtype in ((37, False, torch.float32), (70, True, torch.float32), (37, True, torch.bfloat16)):
        arguments: Arguments = {
            "time_decay": draw(6, dtype=dtype),
            "time_first": draw(6, dtype=dtype),
            "key": 3 * draw(2, rows, 6, dtype=dtype),
            "value": draw(2, rows, 6, dtype=dtype),
            "state": [draw(2, 6), draw(2, 6).exp(), draw(2, 6)] if with_state else None,
            "return_state": with_state,
        }
        yield arguments, False


def _linear_recurrence_samples() -> Iterator[tuple[Arguments, bool]]:
    draw = _Draw()
    for rows, with_state, dtype in ((37, False, torch.float32), (70, True, torch.float32), (37, True, torch.bfloat16)):
        arguments: Arguments = {
            "hidden_states": draw(2, rows, 6, dtype=dtype),
            "recurrent_gate": draw(2, rows, 6, dtype=dtype).sigmoid(),
            "reset": draw(2, rows, 1) > 1.5,
            "recurrent_states": draw(2, 6) if with_state else None,
            "acc_dtype": torch.float32,
        }
        yield arguments, False


def _mlstm_samples() -> Iterator[tuple[Arguments, bool]]:
    draw = _Draw()
    for rows, with_state, dtype in ((70, False, torch.float32), (131, True, torch.float32), (37, True, torch.bfloat16)):
        arguments: Arguments = {
            "query": draw(2, 3, rows, 6, dtype=dtype),
            "key": draw(2, 3, rows, 6, dtype=dtype),
            "value": draw(2, 3, rows, 5, dtype=dtype),
            "igate": draw(2, 3, rows, dtype=dtype) - 1,
            "fgate": draw(2, 3, rows, dtype=dtype) + 3,
            "c_initial": draw(2, 3, 6, 5, dtype=dtype) if with_state else None,
            "n_initial": draw(2, 3, 6, dtype=dtype) if with_state else None,
            "m_initial": draw(2, 3, 1, dtype=dtype) if with_state else None,
        }
        yield arguments, False


class _Draw:
    """Random tensors, the same ones every time, whatever the default device, type or seed."""

    def __init__(self) -> None:
        self.generator = torch.Generator("cpu").manual_seed(0)

    def __call__(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(size, generator=self.generator, dtype=torch.float32, device="cpu").to(dtype)


_DELTA_RULE = Signature(
    operator="gated_delta_rule",
    required=frozenset({"query", "key", "value", "g", "beta", "chunk_size", "initial_state", "output_final_state"}),
    known=frozenset({"use_qk_l2norm_in_kernel"}),
    rows=("key", 1),
    compute=gated_delta_rule,
    samples=functools.partial(_delta_rule_samples, False),
)

SIGNATURES: list[Signature] = [
    _DELTA_RULE,
    dataclasses.replace(_DELTA_RULE, samples=functools.partial(_delta_rule_samples, True)),
    Signature(
        operator="selective_scan",
        required=frozenset(
            {"hidden_states", "dt", "A", "B", "C", "D", "z", "delta_bias", "delta_softplus", "return_last_state"}
        ),
        known=frozenset({"use_mambapy", "use_associative_scan"}),
        rows=("hidden_states", 2),
        compute=selective_scan,
        samples=_selective_scan_samples,
    ),
    Signature(
        operator="linear_attention",
        required=frozenset(
            {"hidden_states", "dt", "A", "B", "C", "chunk_size", "D", "dt_bias", "initial_states", "dt_softplus"}
            | {"dt_limit", "return_final_states"}
        ),
        known=frozenset(),
        rows=("hidden_states", 1),
        compute=state_space_scan,
        samples=_state_space_samples,
    ),
    Signature(
        operator="wkv",
        required=frozenset({"time_decay", "time_first", "key", "value", "state", "return_state"}),
        known=frozenset(),
        rows=("key", 1),
        compute=wkv,
        samples=_wkv_samples,
    ),
    Signature(
        operator="linear_recurrence",
        required=frozenset({"hidden_states", "recurrent_gate", "reset", "recurrent_states", "acc_dtype"}),
        known=frozenset(),
        rows=("hidden_states", 1),
        compute=linear_recurrence,
        samples=_linear_recurrence_samples,
    ),
    Signature(
        operator="mlstm",
        required=frozenset(
            {"self", "query", "key", "value", "igate", "fgate", "c_initial", "n_initial", "m_initial", "mode"}
        ),
        known=frozenset({"return_last_states"}),
        rows=("key", 2),
        compute=mlstm,
        samples=_mlstm_samples,
        stand_in=_with_settings,
        applies=_is_inference,
    ),
]
