"""The gated delta rule, as one operator: DeltaNets whose decay is one number a head, or one a channel of the key.

Per head, with state S [Dk, Dv], decay a_t = exp(g_t) in (0, 1], rate b_t:

    S_t = a_t S_{t-1} + b_t k_t (v_t - k_t^T a_t S_{t-1})^T        y_t = q_t^T S_t

In a tile of C rows, with G the running sum of g, the corrections u_t = b_t (v_t - k_t^T a_t S_{t-1}) solve a unit lower
triangular system (the UT transform), after which all is matrix products:

    M u = b (V - e^G K S_0)      M_ij = b_i k_i.k_j e^(G_i - G_j), j < i;  1 on the diagonal
    S_C = e^(G_C) S_0 + (e^(G_C - G) K)^T u
    Y   = e^G Q S_0 + P u        P_ij = q_i.k_j e^(G_i - G_j), j <= i

Every exponent is at most 0, so nothing overflows, however fast the decay. Rows without output need neither Q nor P.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
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

SMALLEST = 8  # rows of the blocks at which halving ends


@torch.library.custom_op("ridgefill::gated_delta_rule", mutates_args=())
@without_autocast
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
    """Outputs of the last rows, and the state after all rows, of the gated delta rule.

    Args:
        query: [B, T, Hk, Dk], those of the last T of the N rows.
        key: [B, N, Hk, Dk]
        value: [B, N, Hv, Dv]; each key head serves Hv / Hk consecutive value heads.
        g: logarithm of the decay, at most 0: [B, N, Hv], or [B, N, Hv, Dk] for one a channel.
        beta: rate, [B, N, Hv]
        initial_state: [B, Hv, Dk, Dv]; None is zero.
        scale: of the query.
        normalise: whether rows of query and key are first divided by their length.

    Returns:
        Outputs [B, T, Hv, Dv] in the query's dtype, final state [B, Hv, Dk, Dv] in fp32 (which is what is computed in).
    """
    check_rows(key, value, g, beta)
    if fla_kernels.serve(key):
        return fla_kernels.gated_delta_rule(query, key, value, g, beta, initial_state, scale, normalise)
    batch, rows, _, key_dim = key.shape
    heads, value_dim = value.shape[2:]
    wanted = query.shape[1]
    outputs = query.new_empty(batch, wanted, heads, value_dim)
    state = key.new_zeros(batch * heads, key_dim, value_dim, dtype=torch.float32)
    if initial_state is not None:
        state = initial_state.to(torch.float32, copy=True).reshape(state.shape)
    silent = state_only_rows(rows, wanted)
    lead = rows - silent - wanted  # rows of the first tile with outputs that are not asked for
    query = behind_zeros(query, lead)
    for begin, end in ((0, silent), (silent, rows)):
        for first, last, tile in spans(begin, end, batch * heads * max(key_dim, value_dim), key.device):
            part = slice(first, last)
            queries = query[:, first - silent : last - silent] if begin == silent and wanted else None
            prepared = _prepare(queries, key[:, part], value[:, part], g[:, part], beta[:, part], tile, normalise)
            state = _run(prepared, state, scale, outputs, first - silent - lead, tile)
    return outputs, state.unflatten(0, (batch, heads))


@gated_delta_rule.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    scale: float,
    normalise: bool,
) -> tuple[Tensor, Tensor]:
    batch, wanted = query.shape[:2]
    heads, value_dim = value.shape[2:]
    outputs = query.new_empty(batch, wanted, heads, value_dim)
    return outputs, key.new_empty(batch, heads, key.shape[3], value_dim, dtype=torch.float32)


class _Prepared:
    """A stretch of tiles: what the loop over them reads. n tiles of C rows, B batches of H value heads.

    Attributes:
        inverse: M^-1, [n, B * H, C, C]
        values: b V, [n, B * H, C, Dv]
        keys: b e^G K, [n, B * H, C, Dk]
        late_keys: e^(G_C - G) K, [n, B * H, C, Dk]
        decay: e^(G_C), [n, B * H, Dk or 1, 1]
        queries: e^G Q, [n, B * H, C, Dk], and
        pairs: P, [n, B * H, C, C], if there are outputs.
    """

    inverse: Tensor
    values: Tensor
    keys: Tensor
    late_keys: Tensor
    decay: Tensor
    queries: Tensor | None = None
    pairs: Tensor | None = None


def _prepare(
    query: Tensor | None, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, tile: int, normalise: bool
) -> _Prepared:
    groups = value.shape[2] // key.shape[2]
    keys = _unit(in_tiles(key, tile)) if normalise else in_tiles(key, tile)
    total = in_tiles(g, tile).cumsum(2)
    rate = in_tiles(beta, tile).unsqueeze(-1)
    pairs = queries = None
    if query is not None:
        queries = _unit(in_tiles(query, tile)) if normalise else in_tiles(query, tile)
    if total.dim() == 4:  # a decay a channel is part of the products
        keys = _repeated(keys, groups)
        queries = _repeated(queries, groups) if queries is not None else None
        products, *rest = channel_products([keys] if queries is None else [keys, queries], keys, total)
        pairs = rest[0] if rest else None
    else:
        between = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril_().exp_()
        products = _repeated(keys @ keys.mT, groups) * between
        if queries is not None:
            pairs = (_repeated(queries @ keys.mT, groups) * between).tril_()
            queries = _repeated(queries, groups)
        keys, total = _repeated(keys, groups), total.unsqueeze(-1)
    prepared, decayed = _Prepared(), total.exp()
    prepared.inverse = inverse_of_unit_lower(products.mul_(rate).tril_(-1))
    prepared.values = in_tiles(value, tile) * rate
    prepared.keys = (keys * decayed).mul_(rate)
    prepared.late_keys = (total[:, :, -1:] - total).exp() * keys
    prepared.decay = decayed[:, :, -1].unsqueeze(-1)
    if queries is not None:
        prepared.queries, prepared.pairs = queries * decayed, pairs
    return prepared


def _run(tiles: _Prepared, state: Tensor, scale: float, outputs: Tensor, first: int, tile: int) -> Tensor:
    """The loop over tiles; writes outputs from row `first` on and returns the state after the last tile."""
    for i in range(tiles.keys.shape[0]):
        missed = torch.baddbmm(tiles.values[i], tiles.keys[i], state, alpha=-1)
        corrections = tiles.inverse[i] @ missed
        if tiles.queries is not None and tiles.pairs is not None:
            within = tiles.pairs[i] @ corrections
            rows = torch.baddbmm(within, tiles.queries[i], state).mul_(scale)
            put(outputs, first + i * tile, in_rows(rows.unsqueeze(0), outputs.shape[0]))
        state = torch.baddbmm(tiles.decay[i] * state, tiles.late_keys[i].mT, corrections)
    return state


def _unit(rows: Tensor) -> Tensor:
    return rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + 1e-6)


def _repeated(heads: Tensor, times: int) -> Tensor:
    """`[n, B * H, ...]`, each head `times` times in a row."""
    return heads.repeat_interleave(times, 1) if times > 1 else heads


def inverse_of_unit_lower(strict: Tensor) -> Tensor:
    """`(I + L)^-1` of strictly lower triangular matrices L [..., C, C], by halves:

        [A 0; B D]^-1 = [A^-1 0; -D^-1 B A^-1  D^-1]

    Exact inverses of blocks, unlike powers of L, do not grow; and on a CPU it is far faster than a batched
    triangular solve.
    """
    size = strict.shape[-1]
    if size <= SMALLEST:
        identity = torch.eye(size, dtype=strict.dtype, device=strict.device)
        small: Tensor = torch.linalg.solve_triangular(strict + identity, identity, upper=False, unitriangular=True)
        return small
    half = size // 2
    result = torch.zeros_like(strict)
    upper = inverse_of_unit_lower(strict[..., :half, :half])
    lower = inverse_of_unit_lower(strict[..., half:, half:])
    result[..., :half, :half], result[..., half:, half:] = upper, lower
    result[..., half:, :half] = -(lower @ (strict[..., half:, :half] @ upper))
    return result


def channel_products(lefts: list[Tensor], right: Tensor, total: Tensor) -> list[Tensor]:
    """`sum_d left_id right_jd e^(G_id - G_jd)` for j <= i, else 0, of rows [..., C, D] and running sums G [..., C, D].

    Between the later half of a block and the earlier one, the decay parts at the later half's first row r into
    `e^(G_i - G_r) e^(G_r - G_j)`, both at most 1, and is folded into the rows of one matrix product. Only inside the
    smallest blocks each pair of rows has an exponential of its own, one diagonal at a time.
    """
    rows = right.shape[-2]
    size = SMALLEST
    while size < rows:
        size *= 2
    *lefts, right, total = (F.pad(x, (0, 0, 0, size - rows)) for x in (*lefts, right, total))
    results = [left.new_zeros(*left.shape[:-1], size) for left in lefts]
    small_lefts, (small, sums) = _blocks_of_rows(lefts, SMALLEST), _blocks_of_rows([right, total], SMALLEST)
    for back in range(SMALLEST):
        late, early = (..., slice(back, None), slice(None)), (..., slice(SMALLEST - back), slice(None))
        decayed = (sums[late] - sums[early]).clamp_(max=0).exp_().mul_(small[early])
        for left, result in zip(small_lefts, results, strict=True):
            diagonal_blocks(result, SMALLEST).diagonal(-back, -2, -1).copy_((left[late] * decayed).sum(-1))
    half = SMALLEST
    while half < size:
        late, early = (..., slice(half, None), slice(None)), (..., slice(half), slice(None))
        all_lefts, (all_rights, sums) = _blocks_of_rows(lefts, 2 * half), _blocks_of_rows([right, total], 2 * half)
        turn = sums[..., half : half + 1, :]
        before = (turn - sums[early]).clamp_(max=0).exp_().mul_(all_rights[early])
        after = (sums[late] - turn).exp_()
        for left, result in zip(all_lefts, results, strict=True):
            diagonal_blocks(result, 2 * half)[..., half:, :half].copy_((left[late] * after) @ before.mT)
        half *= 2
    return [result[..., :rows, :rows] for result in results]


def _blocks_of_rows(tensors: list[Tensor], size: int) -> list[Tensor]:
    """[..., n * size, D] as [..., n, size, D]."""
    return [tensor.unflatten(-2, (-1, size)) for tensor in tensors]


def diagonal_blocks(matrix: Tensor, size: int) -> Tensor:
    """The blocks [..., n, size, size] on the diagonal of [..., n * size, n * size], as a view."""
    apart: Tensor = matrix.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
    return apart.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
