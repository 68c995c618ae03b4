"""Linear attention with a decay a head and row, as one operator: Mamba-2's scan, lightning attention, retention.

Per head, with state S [K, V] and decay e^(g_t) in (0, 1]:

    S_t = e^(g_t) S_{t-1} + k_t v_t^T        y_t = q_t^T S_t

In a tile of C rows, with G the running sum of g:

    S_C = e^(G_C) S_0 + K^T (e^(G_C - G) V)
    Y   = e^G Q S_0 + P V        P_ij = q_i.k_j e^(G_i - G_j), j <= i

Query and key are shared by groups of heads: products with them are taken for a group at once, over the values of all
its heads side by side. Every exponent is at most 0. Rows without output need neither Q nor P.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgefill_compile.recurrences import fla_kernels
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


@torch.library.custom_op("ridgefill::linear_attention", mutates_args=())
@without_autocast
def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Outputs of the last rows, and the state after all rows, of linear attention with decay.

    Args:
        query: [B, T, G, K], those of the last T of the N rows.
        key: [B, N, G, K]
        value: [B, N, H, V]; each key head serves H / G consecutive value heads.
        g: logarithm of the decay, at most 0, [B, N, H]
        initial_state: [B, H, K, V]; None is zero.

    Returns:
        Outputs [B, T, H, V] in the value's dtype, final state [B, H, K, V] in fp32 (which is what is computed in).
    """
    check_rows(key, value, g)
    if fla_kernels.serve(key):
        return fla_kernels.linear_attention(query, key, value, g, initial_state)
    batch, rows, groups, key_dim = key.shape
    heads, value_dim = value.shape[2:]
    wanted, shared = query.shape[1], heads // groups
    outputs = value.new_empty(batch, wanted, heads, value_dim)
    state = key.new_zeros(batch * groups, key_dim, shared, value_dim, dtype=torch.float32)
    if initial_state is not None:
        state = state + initial_state.reshape(-1, shared, key_dim, value_dim).transpose(1, 2)
    silent = state_only_rows(rows, wanted)
    lead = rows - silent - wanted  # rows of the first tile with outputs that are not asked for
    query = behind_zeros(query, lead)
    value, g = value.unflatten(2, (groups, shared)), g.unflatten(2, (groups, shared))
    for begin, end in ((0, silent), (silent, rows)):
        for first, last, tile in spans(begin, end, batch * heads * max(value_dim, key_dim // shared), key.device):
            keys, values, decays = (in_tiles(operand[:, first:last], tile) for operand in (key, value, g))
            total = decays.cumsum(2)  # [n, B * G, C, H / G]
            states, state = _states(keys, values, total, state)
            if begin == silent and wanted:
                queries = in_tiles(query[:, first - silent : last - silent], tile)
                results = in_rows(_outputs(queries, keys, values, total, states), batch)
                put(outputs, first - silent - lead, results.flatten(2, 3))
    return outputs, state.transpose(1, 2).reshape(batch, heads, key_dim, value_dim).contiguous()


@linear_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, g: Tensor, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, wanted = query.shape[:2]
    heads, value_dim = value.shape[2:]
    outputs = value.new_empty(batch, wanted, heads, value_dim)
    return outputs, key.new_empty(batch, heads, key.shape[3], value_dim, dtype=torch.float32)


def _states(keys: Tensor, values: Tensor, total: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """States [n, B * G, K, H / G, V] before each tile, and the one after the last."""
    late = values * (total[:, :, -1:] - total).exp_().unsqueeze(-1)
    added = (keys.mT @ late.flatten(-2)).unflatten(-1, values.shape[-2:])
    return states_of_tiles(added, total[:, :, -1].exp()[:, :, None, :, None], state)


def states_of_tiles(added: Tensor, kept: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """States `[n, ...]` before each tile, and the one after the last.

    Args:
        added: what each tile adds, [n, ...].
        kept: how much each leaves of the state before it, of a shape that spreads over that.
        state: before the first.
    """
    states = torch.empty_like(added)
    for i in range(len(added)):
        states[i] = state
        state = torch.addcmul(added[i], kept[i], state)
    return states, state


def _outputs(queries: Tensor, keys: Tensor, values: Tensor, total: Tensor, states: Tensor) -> Tensor:
    """[n, B * G, C, H / G, V]"""
    heads_first = total.movedim(-1, 2)
    between = (heads_first.unsqueeze(-1) - heads_first.unsqueeze(-2)).tril_().exp_()
    pairs = between.mul_((queries @ keys.mT).tril_().unsqueeze(2))
    within = (pairs @ values.transpose(2, 3)).transpose(2, 3)
    from_state = (queries @ states.flatten(-2)).unflatten(-1, values.shape[-2:])
    return torch.addcmul(within, total.exp().unsqueeze(-1), from_state)
