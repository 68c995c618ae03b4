"""xLSTM's matrix memory, as one operator: linear attention with exponential gates and a stabilised denominator.

Per head, with state C [K, V], n [K] and its level m, input gate i_t and forget gate f_t (before their activations):

    m_t = max(log sigmoid(f_t) + m_{t-1}, i_t)
    C_t = e^(log sigmoid(f_t) + m_{t-1} - m_t) C_{t-1} + e^(i_t - m_t) k_t v_t^T        n_t likewise, of k_t
    y_t = q_t^T C_t / (max(|q_t^T n_t|, e^(-m_t)) + eps)

n is what becomes of one more value, which is 1 in every row: so both are one state, of values with a one behind them.
In a tile of C rows, with G the running sum of log sigmoid(f), a = i - G and r_i the greatest of m_0 and a_1 .. a_i:

    m_i = G_i + r_i
    S_C = e^(m_0 - r_C) S_0 + K^T (e^(a - r_C) V)
    Y   = e^(m_0 - r) Q S_0 + P V        P_ij = q_i.k_j e^(a_j - r_i), j <= i

which are the products of linear attention. Every exponent is at most 0 but that of e^(-m); where this is infinite, the
output is 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgefill_compile.recurrences.linear_attention import states_of_tiles
from ridgefill_compile.recurrences.tiles import (
    behind_zeros,
    check_rows,
    in_rows,
    in_tiles,
    put,
    spans,
    state_only_rows,
    without_autocast,
)


@torch.library.custom_op("ridgefill::mlstm", mutates_args=())
@without_autocast
def mlstm(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    igate: Tensor,
    fgate: Tensor,
    memory: Tensor | None,
    normaliser: Tensor | None,
    level: Tensor | None,
    scale: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs of the last rows, and the state after all rows, of a matrix memory.

    Args:
        query: [B, T, H, K], those of the last T of the N rows.
        key: [B, N, H, K]
        value: [B, N, H, V]
        igate: input gate, an exponent, [B, N, H]
        fgate: forget gate before its sigmoid, [B, N, H]
        memory: C before the first row, [B, H, K, V]; None is zero, and so for the other two.
        normaliser: n, [B, H, K]
        level: m, [B, H, 1]
        scale: of the query.
        eps: added to the denominator.

    Returns:
        Outputs [B, T, H, V] in the query's dtype; C, n and m after all rows, in fp32 (which is what is computed in).
    """
    check_rows(key, value, igate, fgate)
    batch, rows, heads, key_dim = key.shape
    value_dim, wanted = value.shape[3], query.shape[1]
    outputs = query.new_empty(batch, wanted, heads, value_dim)
    state = key.new_zeros(batch, heads, key_dim, value_dim + 1, dtype=torch.float32)
    if memory is not None:
        state[..., :-1] = memory
    if normaliser is not None:
        state[..., -1] = normaliser
    state = state.flatten(0, 1)
    reached = key.new_zeros(batch * heads, dtype=torch.float32)
    if level is not None:
        reached = reached + level.reshape(-1)
    silent = state_only_rows(rows, wanted)
    lead = rows - silent - wanted  # rows of the first tile with outputs that are not asked for
    query = behind_zeros(query, lead)
    for begin, end in ((0, silent), (silent, rows)):
        for first, last, tile in spans(begin, end, batch * heads * max(key_dim, value_dim), key.device):
            keys, values, gains, forgets = (in_tiles(x[:, first:last], tile) for x in (key, value, igate, fgate))
            values = F.pad(values, (0, 1), value=1.0)
            total = F.logsigmoid(forgets).cumsum(2)  # G, [n, B * H, C]
            gains = gains - total
            greatest = gains.cummax(2).values
            before, reached = _levels(greatest[:, :, -1], total[:, :, -1], reached)
            most = torch.maximum(before.unsqueeze(-1), greatest)  # r
            states, state = _states(keys, values, gains, before, most[:, :, -1:], state)
            if begin == silent and wanted:
                queries = in_tiles(query[:, first - silent : last - silent], tile) * scale
                sums = _sums(queries, keys, values, gains, before, most, states)
                least = (total + most).neg_().exp_().unsqueeze(-1)
                results = sums[..., :-1] / (torch.maximum(sums[..., -1:].abs(), least) + eps)
                put(outputs, first - silent - lead, in_rows(results, batch))
    state = state.view(batch, heads, key_dim, value_dim + 1)
    memory, normaliser = (x.clone(memory_format=torch.contiguous_format) for x in (state[..., :-1], state[..., -1]))
    return outputs, memory, normaliser, reached.reshape(batch, heads, 1)


@mlstm.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    igate: Tensor,
    fgate: Tensor,
    memory: Tensor | None,
    normaliser: Tensor | None,
    level: Tensor | None,
    scale: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, wanted, heads, key_dim = query.shape
    value_dim = value.shape[3]
    states = [
        key.new_empty(batch, heads, *sizes, dtype=torch.float32) for sizes in ((key_dim, value_dim), (key_dim,), (1,))
    ]
    return query.new_empty(batch, wanted, heads, value_dim), states[0], states[1], states[2]


def _levels(greatest: Tensor, total: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
    """Levels m [n, B * H] before each tile, and the one after the last, from each tile's greatest a and its sum G."""
    levels = torch.empty_like(greatest)
    for i in range(len(greatest)):
        levels[i] = level
        level = torch.maximum(level, greatest[i]) + total[i]
    return levels, level


def _states(
    keys: Tensor, values: Tensor, gains: Tensor, before: Tensor, most: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """States [n, B * H, K, V + 1] before each tile, and the one after the last; `most` is r of the last rows."""
    late = keys * (gains - most).exp_().unsqueeze(-1)
    kept = (before.unsqueeze(-1) - most).exp_().unsqueeze(-1)
    return states_of_tiles(late.mT @ values, kept, state)


def _sums(
    queries: Tensor, keys: Tensor, values: Tensor, gains: Tensor, before: Tensor, most: Tensor, states: Tensor
) -> Tensor:
    """Numerators and, last, the denominator, [n, B * H, C, V + 1]."""
    between = (gains.unsqueeze(-2) - most.unsqueeze(-1)).exp_()
    pairs = between.mul_(queries @ keys.mT).tril_()  # above the diagonal may be anything, and goes
    entered = queries * (before.unsqueeze(-1) - most).exp_().unsqueeze(-1)
    sums = (pairs @ values).flatten(0, 1)
    torch.baddbmm(sums, entered.flatten(0, 1), states.flatten(0, 1), out=sums)
    return sums.view_as(values)
