"""A linear recurrence with a decay of its own for every channel and row, as one operator: gated linear recurrent units.

    h_t = a_t h_{t-1} + x_t        y_t = h_t

The rows go through `linear_scan`, in stretches side by side.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from ridgefill_compile.recurrences.selective_scan import linear_scan
from ridgefill_compile.recurrences.tiles import without_autocast


@torch.library.custom_op("ridgefill::linear_recurrence", mutates_args=())
@without_autocast
def linear_recurrence(x: Tensor, decay: Tensor, initial_state: Tensor | None, outputs: int) -> tuple[Tensor, Tensor]:
    """The states after the last rows, and the one after all rows.

    Args:
        x: [B, N, D]
        decay: between 0 and 1, [B, N, D]
        initial_state: [B, D]; None is zero.
        outputs: how many last rows to put out; -1: all.

    Returns:
        States [B, outputs, D] in the type of x, final state [B, D] in fp32 (which is what is computed in).
    """
    states, decays = (operand.transpose(0, 1).to(torch.float32, copy=True) for operand in (x, decay))
    state = torch.zeros_like(states[0]) if initial_state is None else initial_state.to(torch.float32)
    linear_scan(decays, states, state, math.isqrt(len(states)))
    wanted = x.shape[1] if outputs < 0 else outputs
    last = states[len(states) - wanted :].transpose(0, 1)
    return last.to(x.dtype, copy=True, memory_format=torch.contiguous_format), states[-1].clone()


@linear_recurrence.register_fake
def _(x: Tensor, decay: Tensor, initial_state: Tensor | None, outputs: int) -> tuple[Tensor, Tensor]:
    batch, rows, channels = x.shape
    wanted = rows if guard_or_false(outputs < 0) else outputs  # a symbolic number of rows is no -1
    return x.new_empty(batch, wanted, channels), x.new_empty(batch, channels, dtype=torch.float32)
