"""The selective scan of Mamba-1, as one operator: a decay of its own for every channel, entry of the state and row.

Per channel d and entry s of the state:

    h_t = e^(dt_t A) h_{t-1} + dt_t x_t B_t        y_t = sum_s C_t h_t

No two decays are equal, so there are no matrix products to be had over rows: rows with outputs go one after the other,
each by one fused multiply-add over all channels and entries (on a GPU, of many stretches of rows side by side, which
are joined afterwards). Rows without outputs need no states in between: with R_t the sum of dt over rows after row t,

    h_N = e^(R_0 A) h_0 + sum_t e^(R_t A) dt_t x_t B_t

is a sum over rows. A is at most 0 and dt at least 0, so no exponent is above 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ridgefill_compile.recurrences.tiles import without_autocast

LANES = 32  # stretches side by side on a GPU
_BUDGET = {"cpu": 2**19}  # floats per buffer: about a CPU's second-level caches; else
_DEFAULT_BUDGET = 2**26


@torch.library.custom_op("ridgefill::selective_scan", mutates_args=())
@without_autocast
def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Outputs of the last rows, and the state after all rows, of a selective scan.

    Args:
        x: input, [B, D, N]
        dt: step, at least 0, [B, D, N]
        A: decay of a unit step, at most 0, [D, S]
        B: from input to state, [B, S, N]
        C: from state to output, [B, S, T], of the last T of the N rows.
        initial_state: [B, D, S]; None is zero.

    Returns:
        Outputs [B, D, T] in the type of x, final state [B, D, S] in fp32 (which is what is computed in).
    """
    batch, channels, rows = x.shape
    wanted = C.shape[2]
    outputs = x.new_empty(batch, channels, wanted)
    # Channels last, so that every operation runs along them; exponents of 2, which is three times as fast as of e.
    steps = dt.to(torch.float32).permute(2, 0, 1).contiguous()
    inputs = torch.mul(x.permute(2, 0, 1), steps, out=torch.empty_like(steps))
    decay = (A.to(torch.float32) * math.log2(math.e)).t().contiguous()
    to_state, to_output = (matrix.to(torch.float32).permute(2, 0, 1) for matrix in (B, C))
    state = steps.new_zeros(batch, *decay.shape)
    if initial_state is not None:
        state = state + initial_state.mT
    stretch = max(1, _BUDGET.get(x.device.type, _DEFAULT_BUDGET) // state.numel())
    buffers = steps.new_empty(2, min(stretch, rows), *state.shape)
    silent = rows - wanted
    for first in range(0, silent, stretch):
        part = slice(first, min(first + stretch, silent))
        state = _accumulated(steps[part], inputs[part], decay, to_state[part], state, buffers[0])
    for first in range(silent, rows, stretch):
        part = slice(first, min(first + stretch, rows))
        states = _states(steps[part], inputs[part], decay, to_state[part], state, buffers)
        state = states[-1].clone()
        here = slice(part.start - silent, part.stop - silent)
        outputs[:, :, here] = (to_output[here].unsqueeze(2) @ states).squeeze(2).permute(1, 2, 0)
    return outputs, state.mT.contiguous()


@selective_scan.register_fake
def _(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, channels, _ = x.shape
    state = x.new_empty(batch, channels, A.shape[1], dtype=torch.float32)
    return x.new_empty(batch, channels, C.shape[2]), state


def _accumulated(
    steps: Tensor, inputs: Tensor, decay: Tensor, to_state: Tensor, state: Tensor, buffer: Tensor
) -> Tensor:
    """State [B, S, D] after some rows: steps and inputs [n, B, D], decay [S, D], to_state [n, B, S]."""
    passed = steps.cumsum(0)
    total = passed[-1].unsqueeze(1)
    weights = buffer[: len(steps)]  # [n, B, S, D]
    torch.mul(decay, passed[-1:].sub(passed).unsqueeze(2), out=weights)
    weights.exp2_().mul_(inputs.unsqueeze(2))
    added = (to_state.permute(1, 2, 0).unsqueeze(2) @ weights.permute(1, 2, 0, 3)).squeeze(2)
    return added.addcmul_((decay * total).exp2_(), state)


def _states(steps: Tensor, inputs: Tensor, decay: Tensor, to_state: Tensor, state: Tensor, buffers: Tensor) -> Tensor:
    """States [n, B, S, D] after each row."""
    decays, states = buffers[:, : len(steps)]
    torch.mul(decay, steps.unsqueeze(2), out=decays)
    torch.mul(to_state.unsqueeze(3), inputs.unsqueeze(2), out=states)
    return linear_scan(decays.exp2_(), states, state, 1 if steps.device.type == "cpu" else LANES)


def linear_scan(decays: Tensor, added: Tensor, state: Tensor, lanes: int) -> Tensor:
    """`h_t = decay_t h_{t-1} + added_t`, all of them, in the place of `added`; rows are the first dimension.

    Up to `lanes` equal stretches of rows are run side by side from zero, then joined: what entered a stretch decays
    along it. Both operands are written over.
    """
    rows = added.shape[0] // lanes * lanes if lanes > 1 else 0
    if rows > lanes:
        apart, decaying = (x[:rows].unflatten(0, (lanes, -1)) for x in (added, decays))
        for t in range(1, apart.shape[1]):
            apart[:, t].addcmul_(decaying[:, t], apart[:, t - 1])
            decaying[:, t].mul_(decaying[:, t - 1])
        for lane in range(lanes):
            apart[lane].addcmul_(decaying[lane], state)
            state = apart[lane, -1]
    else:
        rows = 0
    for one, decay in zip(added[rows:].unbind(), decays[rows:].unbind(), strict=True):
        state = one.addcmul_(decay, state)
    return added
