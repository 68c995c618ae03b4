"""Recurrences on CUDA by the Triton kernels of flash-linear-attention, where it is installed.

They put out every row. Rows that nobody asked for get queries of zeros, and are cut off. In fp32 the kernels multiply
in TF32, as is usual on such devices.

Held to the operators in plain torch with fla 0.6.0 in Triton's interpreter, in fp32: gated delta rule and Kimi delta
rule to 1e-6, linear attention to 1e-6 of the largest output. Earlier versions take other arguments.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata

import torch
from packaging.version import Version
from torch import Tensor

from ridgefill_compile.recurrences.tiles import behind_zeros

LEAST_VERSION = "0.6"
MOST_KEY_DIM = 256  # of the delta rules' kernels; linear attention has no heads as wide


@functools.cache
def are_installed() -> bool:
    """Whether a version is installed that takes what it is given here."""
    try:
        return Version(importlib.metadata.version("fla-core")) >= Version(LEAST_VERSION)
    except importlib.metadata.PackageNotFoundError:
        return False


def serve(key: Tensor) -> bool:
    """Whether the kernels can be used for keys [B, N, H, K]."""
    return key.is_cuda and key.shape[-1] <= MOST_KEY_DIM and are_installed()


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    scale: float,
    normalise: bool,
) -> tuple[Tensor, Tensor]:
    """See the operator `ridgefill::gated_delta_rule`."""
    if g.dim() == 4:
        kernel = importlib.import_module("fla.ops.kda").chunk_kda
    else:
        kernel = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    wanted = query.shape[1]
    outputs, state = kernel(
        behind_zeros(query, key.shape[1] - wanted).to(value.dtype),
        key.to(value.dtype),
        value,
        g=g,
        beta=beta,
        scale=scale,
        initial_state=None if initial_state is None else initial_state.float(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=normalise,
    )
    return _last(outputs, wanted, query.dtype), state.float()


def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See the operator `ridgefill::linear_attention`."""
    kernel = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla
    wanted, shared = query.shape[1], value.shape[2] // key.shape[2]
    query = behind_zeros(query, key.shape[1] - wanted)
    query, key = (heads.to(value.dtype).repeat_interleave(shared, 2) for heads in (query, key))
    outputs, state = kernel(
        query,
        key,
        value,
        g=g,
        scale=1.0,
        initial_state=None if initial_state is None else initial_state.float(),
        output_final_state=True,
    )
    return _last(outputs, wanted, value.dtype), state.float()


def _last(outputs: Tensor, wanted: int, dtype: torch.dtype) -> Tensor:
    return outputs[:, outputs.shape[1] - wanted :].to(dtype, copy=True, memory_format=torch.contiguous_format)
