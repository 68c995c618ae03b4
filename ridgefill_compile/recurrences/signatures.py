"""Functions of modelling files, by their parameters, and the operator that computes the same.

Recognised is a function that has the parameters of one of `SIGNATURES` and no unknown ones. That is a reason to try;
whether it is the same function is decided by its results on `samples` (see `substitute`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgefill_compile.recurrences import samples, table  # noqa: F401  (the table registers the operators)
from ridgefill_compile.recurrences.block_index import block_index
from ridgefill_compile.recurrences.samples import Arguments


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
        reads: names that its code must use, such as attributes of `self`, where parameters tell too little.
        one_row: whether it is replaced for one row, too, since Dynamo cannot trace it at all.
        stand_in: makes the `self` to compare on, of the class whose method it is; None where the method reads none.
        applies: whether the operator computes the same with these arguments; else the traced call is the model's own.
    """

    operator: str
    required: frozenset[str]
    known: frozenset[str]
    rows: tuple[str, int]
    compute: Callable[[Arguments], Any]
    samples: Callable[[], Iterator[tuple[Arguments, bool]]]
    reads: frozenset[str] = frozenset()
    one_row: bool = False
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


_DELTA_RULE = Signature(
    operator="gated_delta_rule",
    required=frozenset({"query", "key", "value", "g", "beta", "chunk_size", "initial_state", "output_final_state"}),
    known=frozenset({"use_qk_l2norm_in_kernel"}),
    rows=("key", 1),
    compute=gated_delta_rule,
    samples=functools.partial(samples.delta_rule, False),
)

SIGNATURES: list[Signature] = [
    _DELTA_RULE,
    dataclasses.replace(_DELTA_RULE, samples=functools.partial(samples.delta_rule, True)),
    Signature(
        operator="selective_scan",
        required=frozenset(
            {"hidden_states", "dt", "A", "B", "C", "D", "z", "delta_bias", "delta_softplus", "return_last_state"}
        ),
        known=frozenset({"use_mambapy", "use_associative_scan"}),
        rows=("hidden_states", 2),
        compute=selective_scan,
        samples=samples.selective_scan,
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
        samples=samples.state_space,
    ),
    Signature(
        operator="wkv",
        required=frozenset({"time_decay", "time_first", "key", "value", "state", "return_state"}),
        known=frozenset(),
        rows=("key", 1),
        compute=wkv,
        samples=samples.wkv,
    ),
    Signature(
        operator="linear_recurrence",
        required=frozenset({"hidden_states", "recurrent_gate", "reset", "recurrent_states", "acc_dtype"}),
        known=frozenset(),
        rows=("hidden_states", 1),
        compute=linear_recurrence,
        samples=samples.linear_recurrence,
    ),
    Signature(
        operator="block_index",
        required=frozenset({"hidden_states", "position_embeddings", "attention_mask"}),
        known=frozenset({"cache", "past_key_values"}),
        rows=("hidden_states", 1),
        compute=block_index,
        samples=samples.block_index,
        reads=frozenset({"index_qk_proj", "compress_ratio", "block_topk", "update_indexer"}),
        one_row=True,
    ),
    Signature(
        operator="mlstm",
        required=frozenset(
            {"self", "query", "key", "value", "igate", "fgate", "c_initial", "n_initial", "m_initial", "mode"}
        ),
        known=frozenset({"return_last_states"}),
        rows=("key", 2),
        compute=mlstm,
        samples=samples.mlstm,
        stand_in=samples.with_settings,
        applies=_is_inference,
    ),
]
