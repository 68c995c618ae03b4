"""Matrices in eight bits: a whole number for each weight, and a scale for each row and group of 128 columns.

    matrix[i, j] ≈ codes[i, j] · scales[i, j // 128]        scale = bfloat16(largest |weight| of the group / 127)

Codes are rounded against the scale as it is stored, so no weight is off by more than half of it: 0.395 % of the
largest weight of its group.

In a graph the matrix is made right before its product. torch's product that takes codes has one scale a row; a sum of
it over groups took 635 ms where making the matrix first took 15 (3,584 rows, width 576, float32, on two cores). It is
worth it for bfloat16 on CPUs that do not multiply it (42 ms for 121), where the model's own products are as slow.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgefill_compile.errors import MapsError

GROUP = 128  # columns that share a scale
LARGEST = 127


class Codes(NamedTuple):
    """A matrix `[d_out, d_in]` as it is stored.

    Attributes:
        codes: int8 `[d_out, d_in]`, -127 to 127.
        scales: bfloat16 `[d_out, group_count(d_in)]`, above 0.
    """

    codes: Tensor
    scales: Tensor


def group_count(columns: int) -> int:
    """Scales of a row; the last one may be of fewer columns."""
    return -(-columns // GROUP)


def quantise(matrix: Tensor) -> Codes:
    """The nearest codes of a float matrix `[d_out, d_in]`, ties to even.

    Raises:
        MapsError: a weight is NaN, infinite or too large for float32.
    """
    rows, columns = matrix.shape
    groups = F.pad(matrix.detach().float(), (0, -columns % GROUP)).reshape(rows, group_count(columns), GROUP)
    scales = (groups.abs().amax(2) / LARGEST).to(torch.bfloat16)
    if not scales.isfinite().all():
        raise MapsError("a matrix with NaN or infinite weights cannot be stored as int8")
    scales = torch.where(scales > 0, scales, 1.0)  # of zeros, or of numbers too small for any scale
    codes = (groups / scales.float()[:, :, None]).round().clamp(-LARGEST, LARGEST).to(torch.int8)
    return Codes(codes.reshape(rows, -1)[:, :columns].contiguous(), scales)


def dequantise(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix `[d_out, d_in]` that codes and scales stand for: exact in float32, rounded once to other dtypes.

    Ops that trace, and that Inductor makes one kernel of.
    """
    rows, columns = codes.shape
    if columns % GROUP == 0:
        grouped = codes.float().reshape(rows, -1, GROUP) * scales.float()[:, :, None]
        return grouped.reshape(rows, columns).to(dtype)
    # Looked up, since Inductor's C++ loops (torch 2.13) leave out the last columns of scales that are expanded and cut.
    group = torch.arange(columns, device=codes.device) // GROUP
    return (codes.float() * scales.float()[:, group]).to(dtype)
