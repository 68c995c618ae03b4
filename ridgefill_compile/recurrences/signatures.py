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
from torch import Tensor

from ridgefill_compile.recurrences import table  # noqa: F401  (registers the operators)

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Signature:
    """What a function to be substituted looks like.

    Attributes:
        operator: name of the operator.
        required: parameters it must have.
        known: further ones that it may have, beside `**kwargs` (which these functions ignore).
        compute: the same results by the operator, from all arguments by name. Dynamo traces it.
        samples: arguments to compare on. A sample marked optional may be refused by the function (with any error).
    """

    operator: str
    required: frozenset[str]
    known: frozenset[str]
    compute: Callable[[Arguments], Any]
    samples: Callable[[], Iterator[tuple[Arguments, bool]]]


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
    compute=gated_delta_rule,
    samples=functools.partial(_delta_rule_samples, False),
)

SIGNATURES: list[Signature] = [
    _DELTA_RULE,
    dataclasses.replace(_DELTA_RULE, samples=functools.partial(_delta_rule_samples, True)),
]
