"""Calls of every op that has a row rule, on sizes chosen to collide.

Where a rule told dimensions apart by their size, it would be wrong on one of these: the row count equals heads, head
size, width, or batch times rows; sizes are 1; operands broadcast, are permuted in memory, or hold flattened batches.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from ridgefill_compile.testing.square import Sample, Size, sample
from tests.passes.graphs import aten

_generator = torch.Generator().manual_seed(0)
N = 6  # rows, and whatever collides with them
CUBES = [(2, N, N), (2, N, 4), (1, N, 2), (2, 1, N), (N, N, N), (2 * N, N), (N, N), (2, N, N, N)]


def real(*shape: int) -> torch.Tensor:
    """Normal entries."""
    return torch.randn(shape, generator=_generator)


def strided(*shape: int) -> torch.Tensor:
    """The same, laid out back to front in memory."""
    return real(*reversed(shape)).permute(*reversed(range(len(shape))))


def whole(high: int, *shape: int) -> torch.Tensor:
    """Whole numbers from 0 to high - 1."""
    return torch.randint(high, shape, generator=_generator)


def flags(*shape: int) -> torch.Tensor:
    """True and False, evenly."""
    return real(*shape) > 0


def cubes() -> Iterator[torch.Tensor]:
    """A tensor of every size, and one that is not contiguous."""
    for shape in CUBES:
        yield real(*shape)
    yield strided(2, N, N)


def with_dims(op: Any, *, many: bool = False, after: tuple[Any, ...] = (), **kwargs: Any) -> Iterator[Sample]:
    """`op(x, *after, dim)` for every dimension, counted from either end."""
    for x in (real(2, N, N), strided(2, N, 4), real(N, N), real(1, N, 3)):
        for dim in range(-x.dim(), x.dim()):
            yield sample(op, x, *after, [dim] if many else dim, **kwargs)


def elementwise() -> Iterator[Sample]:
    double = real(3).double()
    for x in cubes():
        yield sample(aten.to.dtype, x, torch.float64)
        yield sample(aten.contiguous.default, x)
        yield sample(aten.clone.default, x)
    x, y = real(2, N, N), strided(2, N, N)
    y[0, 2, 3] = torch.nan
    for z in (x, y):
        yield sample(aten.to.device, z, "cpu", torch.float64)
        yield sample(aten.to.dtype_layout, z, dtype=torch.float64)
        yield sample(aten.to.other, z, double)
        yield sample(aten._to_copy.default, z, dtype=torch.float64)
        yield sample(aten.type_as.default, z, double)
        yield sample(aten.type_as.default, z, real(N, N).double())
        for op in (aten.detach, aten.alias, aten.square, aten.nan_to_num):
            yield sample(op.default, z)
        for op in (aten.zeros_like, aten.ones_like, aten.empty_like):
            yield sample(op.default, z)
        yield sample(aten.full_like.default, z, 3.0)
        yield sample(aten.bucketize.Tensor, z, torch.linspace(-1, 1, N))
        yield sample(aten.clone.default, z, memory_format=torch.contiguous_format)


def factories() -> Iterator[Sample]:
    x = real(2, N)
    for size in ([2, N, N], [N], [1, N, 1]):
        yield sample(aten.full.default, size, 3.0)
        yield sample(aten.full.default, size, True, dtype=torch.bool)
        for op in (aten.zeros.default, aten.ones.default, aten.empty.memory_format):
            yield sample(op, size)
            yield sample(op, size, dtype=torch.int64)
        for op in (aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default):
            yield sample(op, x, size)
        yield sample(aten.new_full.default, x, size, 3.0, dtype=torch.float64)
    dynamic = [2, Size(0, 1), N]
    yield sample(aten.new_zeros.default, x, dynamic, dynamic=[(0, 1)])
    yield sample(aten.new_full.default, x, dynamic, 3.0, dynamic=[(0, 1)])


def reductions() -> Iterator[Sample]:
    for keepdim in (False, True):
        for op in (aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.amin.default, aten.logsumexp.default):
            yield from with_dims(op, many=True, keepdim=keepdim)
        for op in (aten.var.correction, aten.std.correction):
            yield sample(op, real(2, N, N), [-1], correction=1, keepdim=keepdim)
            yield sample(op, strided(2, N, N), [1], keepdim=keepdim)
        for op in (aten.var.dim, aten.std.dim):
            yield sample(op, real(2, N, N), [-1], True, keepdim)
            yield sample(op, strided(2, N, N), [1], False, keepdim)
        for op in (aten.prod.dim_int, aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim):
            yield from with_dims(op, keepdim=keepdim)
        for op in (aten.any.dim, aten.all.dim):
            for dim in (0, 1, -1):
                yield sample(op, flags(2, N, 3), dim, keepdim)
        for x in (real(2, N, N), strided(N, N, N)):
            yield sample(aten.norm.ScalarOpt_dim, x, 2, [-1], keepdim)
            yield sample(aten.linalg_vector_norm.default, x, 2, [0, -1], keepdim)
            yield sample(aten.linalg_vector_norm.default, x, 2, [1], keepdim)
            yield sample(aten.sum.dim_IntList, x, [0, 2], keepdim)
    for op in (aten.sum.dim_IntList, aten.mean.dim):
        yield sample(op, real(2, N), None)
        yield sample(op, real(2, N), None, True)
        yield sample(op, real(2, N), [], True)
    yield sample(aten.amax.default, real(2, N, N))
    yield sample(aten.argmax.default, real(2, N, N))


def along() -> Iterator[Sample]:
    yield from with_dims(aten.softmax.int)
    yield from with_dims(aten.log_softmax.int)
    for op in (aten._softmax.default, aten._log_softmax.default):
        for dim in (-1, 1):
            yield sample(op, real(2, N, N), dim, False)
    for packet in (aten.cumsum, aten.cumprod, aten.sort, aten.argsort):
        yield from with_dims(packet.default)
    yield sample(aten.softmax.int, real(2, N, N), -1, torch.float64)
    yield sample(aten.sort.stable, real(2, N, N), stable=True, dim=1, descending=True)
    yield sample(aten.sort.stable, real(2, N, N), stable=True)
    yield sample(aten.sort.default, real(2, N, N))
    for dim in (0, 1, -1):
        yield sample(aten.topk.default, real(N, N, N), 2, dim)
        yield sample(aten.glu.default, strided(N, N, N), dim)
    yield sample(aten.topk.default, real(2, N, N), N)
    yield sample(aten.glu.default, real(2, N, N))
    yield sample(aten.roll.default, real(2, N, N), [1])
    for dims in ([1], [-1], [0, 1], [-2, -1]):
        yield sample(aten.flip.default, real(2, N, N), dims)
        yield sample(aten.roll.default, real(2, N, N), [1] * len(dims), dims)


def norms() -> Iterator[Sample]:
    for x in cubes():
        width = x.shape[-1]
        weight, bias = real(width), real(width)
        yield sample(aten.layer_norm.default, x, [width], weight, bias)
        yield sample(aten.rms_norm.default, x, [width], weight, 1e-6)
        yield sample(aten.native_layer_norm.default, x, [width], weight, bias, 1e-5)
    x, weight = real(2, N, N), real(N, N)
    yield sample(aten.layer_norm.default, x, [N, N], weight)
    yield sample(aten.rms_norm.default, x, [N, N])
    yield sample(aten.native_layer_norm.default, x, [N, N], weight, weight, 1e-5)


def products() -> Iterator[Sample]:
    for x in cubes():
        weight = real(N, x.shape[-1])
        yield sample(aten.linear.default, x, weight, real(N))
        yield sample(aten.linear.default, x, weight)
    yield sample(aten.linear.default, real(N), real(N, N))
    yield sample(aten.linear.default, real(2, N), real(N))
    shapes = [
        ((N, N), (N, N)),
        ((2, N, N), (N, N)),
        ((2, N, N), (2, N, N)),
        ((2, N, N), (1, N, N)),
        ((1, N, 4), (2, 4, N)),
        ((N, N), (2, N, N)),
        ((2, 1, N), (2, N, 1)),
        ((2, N, N, N), (2, N, N, N)),
        ((2, N, N, N), (N, N, N)),
        ((2, 1, N, N), (1, N, N, 4)),
        ((N, N, N), (2, N, N, N)),
        ((2, N, N), (N,)),
        ((N,), (2, N, N)),
        ((N,), (N,)),
    ]
    for size, other in shapes:
        yield sample(aten.matmul.default, real(*size), real(*other))
        yield sample(aten.matmul.default, strided(*size), strided(*other))
    for left, right in ((real(N, N), strided(N, N)), (real(2 * N, 3), real(3, N)), (real(1, N), real(N, 1))):
        n, m = left.shape[0], right.shape[1]
        yield sample(aten.mm.default, left, right)
        for bias in (real(m), real(n, m), real(1, m), real(n, 1), real(1, 1), real(1)):
            yield sample(aten.addmm.default, bias, left, right)
        yield sample(aten.addmm.default, real(m), left, right, beta=0.5, alpha=2)
    batches = [(real(2, N, N), strided(2, N, N)), (real(N, N, N), real(N, N, N)), (real(2, 1, N), real(2, N, 1))]
    for left, right in batches:
        size3 = (left.shape[0], left.shape[1], right.shape[2])
        yield sample(aten.bmm.default, left, right)
        for bias in (real(*size3), real(1, 1, size3[2]), real(size3[1], 1), real(size3[0], 1, 1), real(size3[2])):
            yield sample(aten.baddbmm.default, bias, left, right)
        yield sample(aten.baddbmm.default, real(*size3), left, right, beta=0, alpha=0.25)


def einsums() -> Iterator[Sample]:
    cube = (N, N, N)
    yield sample(aten.einsum.default, "bij,bjk->bik", [real(*cube), strided(*cube)])
    yield sample(aten.einsum.default, "bhid, bhjd -> bhij", [real(2, N, N, N), real(2, N, N, N)])
    yield sample(aten.einsum.default, "bij,jk->bki", [real(2, N, N), real(N, N)])
    yield sample(aten.einsum.default, "ij,ij,ij->ij", [real(N, N), real(N, N), real(N, N)])
    yield sample(aten.einsum.default, "bij->bji", [real(2, N, N)])
    yield sample(aten.einsum.default, "ii->i", [real(N, N)])
    yield sample(aten.einsum.default, "bij,bjk", [real(2, N, N), real(2, N, N)])
    yield sample(aten.einsum.default, "...ij,jk->...ik", [real(2, N, N), real(N, N)])
    yield sample(aten.einsum.default, "bi,bj->bij", [real(1, N), real(4, N)])  # b is spread


def attentions() -> Iterator[Sample]:
    op = aten.scaled_dot_product_attention.default
    query, key, value = real(2, N, N, N), strided(2, N, N, N), real(2, N, N, 3)
    yield sample(op, query, key, value)
    yield sample(op, query, key, value, is_causal=True)
    yield sample(op, query, key, value, None, 0.0, True, scale=0.3)
    yield sample(op, query, real(2, N, 9, N), real(2, N, 9, N), is_causal=True)
    yield sample(op, query, real(2, N, 4, N), real(2, N, 4, N), is_causal=True)
    yield sample(op, query, real(2, 3, N, N), real(2, 3, N, N), is_causal=True, enable_gqa=True)
    yield sample(op, real(2, N, N), real(2, N, N), real(2, N, N), is_causal=True)
    yield sample(op, real(2, N, 1, N), key, value)
    for mask in (real(N, N), real(2, 1, N, N), real(1, N, N, N), real(1, N), real(2, N, 1, N), real(N, 1)):
        yield sample(op, query, key, value, mask)
    visible = torch.ones(N, N, dtype=torch.bool).tril()
    yield sample(op, query, key, value, visible)
    yield sample(op, query, key, value, attn_mask=visible[None, None].expand(2, 1, N, N))
    yield sample(op, query, key, value, is_causal=True, dynamic=[(0, 2), (1, 2), (2, 2)])


def views() -> Iterator[Sample]:
    changes: list[tuple[tuple[int, ...], list[int]]] = [
        ((2, N, N * 4), [2, N, N, 4]),
        ((2, N, N * N), [2, N, N, N]),
        ((2, N, N * N), [2, N, -1, N]),
        ((2, N, N * N), [2, -1, N, N]),
        ((2, N, N, 4), [2, N, N * 4]),
        ((2, N, N, N), [2, N, -1]),
        ((2, N, N), [2 * N, N]),
        ((2, N, N), [-1, N]),
        ((2 * N, N), [2, N, N]),
        ((2 * N, N), [2, -1, N]),
        ((N, N, N), [N * N, N]),
        ((N * N, N), [N, N, N]),
        ((2, 3, N, 4), [N, N, 4]),
        ((N, N, 4), [2, 3, N, 4]),
        ((2, 3, N, 4), [6, N, 4]),
        ((1, N, N), [N, N]),
        ((1, N, N), [-1, N]),
        ((N, N), [1, N, 1, N]),
        ((2, 1, N), [2, N]),
        ((2, N, N), [2 * N * N]),
        ((N, 4), [4, N]),
        ((4, 3), [2, 6]),
        ((2, 4, 3), [4, 6]),
        ((2, 2, 2, 3), [4, 2, 3]),
        ((4, 2, 3), [2, 2, 2, 3]),
        ((2, 6), [2, 2, 3]),
        ((1, 3, 2), [2, 3]),
        ((3, 2), [2, 3]),
        ((1, 9, 4), [6, 6]),
        ((2, 2, 3), [2, 6]),
        ((N,), [N]),
    ]
    for shape, size in changes:
        for op in (aten.view.default, aten.reshape.default, aten._unsafe_view.default):
            yield sample(op, real(*shape), size)
        yield sample(aten.reshape.default, strided(*shape), size)
    for dims in ((0, 1), (1, 2), (-2, -1), (0, -1), (1, 1)):
        yield sample(aten.flatten.using_ints, real(2, N, N), *dims)
        yield sample(aten.flatten.using_ints, strided(2, N, N, N), *dims)
    yield sample(aten.flatten.using_ints, real(N))
    for dim, sizes in ((1, [2, 3]), (-1, [3, -1]), (0, [N, 1]), (2, [N])):
        yield sample(aten.unflatten.int, real(N, N, N), dim, sizes)
        yield sample(aten.unflatten.int, strided(N, N, N), dim, sizes)
    yield sample(aten.view_as.default, real(2, N, N * 4), real(2, N, N, 4))
    yield sample(aten.view_as.default, real(2, N, N), real(2 * N, N))
    yield sample(aten.reshape_as.default, strided(2, N, N), real(2 * N, N))
    yield sample(aten.unflatten.int, real(2, N, N), -1, [2, 3], dynamic=[(0, 1)])
    rows = Size(0, 1)
    for op in (aten.view.default, aten.reshape.default):
        yield sample(op, real(2, N, N * 4), [2, rows, N, 4], dynamic=[(0, 1)])
        yield sample(op, real(2, N, N * 4), [2, rows, -1, 4], dynamic=[(0, 1)])
        yield sample(op, real(2, N, N * 4), [2, -1, N, 4], dynamic=[(0, 1)])
        yield sample(op, real(2, N, N, 4), [Size(0, 0), rows, -1], dynamic=[(0, 0), (0, 1)])
        yield sample(op, real(2, N, N, 4), [2, rows, -1], dynamic=[(0, 1)])
        yield sample(op, real(2, N, N), [-1, N], dynamic=[(0, 1)])
        yield sample(op, real(3, N, N), [-1, N], dynamic=[(0, 0), (0, 1)])
        yield sample(op, real(2 * N, 4), [2, -1, 4], dynamic=[(0, 0)])
        yield sample(op, real(N, 4), [1, Size(0, 0), 4], dynamic=[(0, 0)])
        yield sample(op, real(2, N, 5, 4), [2, N, -1], dynamic=[(0, 2)])
        yield sample(op, real(2, N, 5), [2, -1, Size(0, 2)], dynamic=[(0, 2)])
    yield sample(aten.flatten.using_ints, real(2, N, N), 0, 1, dynamic=[(0, 1)])
    yield sample(aten.flatten.using_ints, real(2, N, N), 1, 2, dynamic=[(0, 1)])


def expansions() -> Iterator[Sample]:
    for op in (aten.expand.default, aten.broadcast_to.default):
        yield sample(op, real(2, N, 1, N), [2, N, N, N])
        yield sample(op, real(2, 1, N, N), [-1, N, -1, -1])
        yield sample(op, real(N), [2, N, N])
        yield sample(op, real(N, 1), [N, N, N])
        yield sample(op, real(1, N), [N, N])
        yield sample(op, real(1, 1), [1, N])
        yield sample(op, real(2, N), [2, N])
        rows = Size(0, 1)
        yield sample(op, real(2, N, 1, 4), [2, rows, 3, 4], dynamic=[(0, 1)])
        yield sample(op, real(2, N, 1, 4), [-1, -1, 3, -1], dynamic=[(0, 1)])
        yield sample(op, real(1, N), [rows, -1], dynamic=[(0, 1)])
        yield sample(op, real(1, N, 1), [3, -1, rows], dynamic=[(0, 1)])


def permutations() -> Iterator[Sample]:
    for order in ([0, 2, 1], [2, 0, 1], [1, 2, 0], [-1, 0, -2]):
        yield sample(aten.permute.default, real(2, N, N), order)
        yield sample(aten.permute.default, strided(N, N, N), order)
    yield sample(aten.permute.default, real(2, N, 3, 4), [0, 2, 1, 3], dynamic=[(0, 1)])
    for op in (aten.transpose.int, aten.swapaxes.default, aten.swapdims.default):
        for dims in ((1, 2), (-1, -2), (0, 2), (1, 1), (-3, 1)):
            yield sample(op, real(2, N, N), *dims)
    yield sample(aten.t.default, real(N, N))
    yield sample(aten.t.default, strided(2, N))
    yield sample(aten.t.default, real(N))
    yield sample(aten.mT.default, real(2, N, N))
    yield sample(aten.mT.default, real(N, N))


def single_dims() -> Iterator[Sample]:
    for dim in (0, 1, -1, -2, -4):
        yield sample(aten.unsqueeze.default, real(2, N, N), dim)
    yield sample(aten.unsqueeze.default, real(2, N, 1), 2)
    for x in (real(2, 1, N, 1), real(1, N, N), real(1, 1, N), strided(N, 1, N)):
        for dim in range(-x.dim(), x.dim()):
            yield sample(aten.squeeze.dim, x, dim)
        yield sample(aten.squeeze.default, x)
        yield sample(aten.squeeze.dims, x, [0, -1])
    for x in (real(2, N, N), strided(N, N, N)):
        for dim in range(-3, 3):
            yield sample(aten.select.int, x, dim, 1)
            yield sample(aten.select.int, x, dim, -1)
            yield sample(aten.unbind.int, x, dim)
    yield sample(aten.unbind.int, real(2, N, N))


def slices() -> Iterator[Sample]:
    op, end = aten.slice.Tensor, 2**63 - 1
    for dim in (1, -2, 0, -1):
        for start, stop in ((2, end), (-3, end), (0, end), (None, None), (1, N), (0, 4), (-5, -1), (1, 99), (None, 3)):
            yield sample(op, real(N, N, N), dim, start, stop)
        yield sample(op, strided(N, N, N), dim, 1, end, 2)
    yield sample(op, real(2, N, N))
    yield sample(op, real(2, 1, N), 1, -1, end)
    rows = Size(0, 1)
    ranges: list[tuple[int, Any]] = [(-2, end), (0, rows), (2, end), (0, -2), (1, 4)]
    for first, last in ranges:
        yield sample(op, real(2, N, 4), 1, first, last, dynamic=[(0, 1)])
        yield sample(op, real(2, N, 4), 2, 1, end, dynamic=[(0, 1)])


def joints() -> Iterator[Sample]:
    cat = aten.cat.default
    for dim in (0, 1, -1, -2):
        yield sample(aten.concat.default, [real(N, N, N), strided(N, N, N)], dim)
        yield sample(aten.concatenate.default, [strided(N, N, N), real(N, N, N)], dim)
        yield sample(cat, [real(N, N, N), strided(N, N, N)], dim)
        yield sample(aten.stack.default, [real(N, N, N), strided(N, N, N)], dim)
    yield sample(aten.stack.default, [real(2, N), real(2, N), real(2, N)])
    yield sample(cat, [real(2, 4, N), real(2, 1, N)], 1)
    yield sample(cat, [real(2, 1, N), real(2, 9, N), real(2, N, N)], 1)
    yield sample(cat, [real(2, N, N)], 1)
    yield sample(cat, [real(0), real(2, N, N)], 1)
    yield sample(cat, [real(0), real(2, N, N)], -1)
    yield sample(cat, [real(2, N, N), real(0)], 1)
    yield sample(cat, [real(2, 0, N), real(2, N, N)], 1)
    yield sample(cat, [real(2, N, N), real(2, 0, N)], 1)
    yield sample(cat, [real(2, N, N).double(), real(2, N, N)], 1)  # the result is of the wider type
    yield sample(cat, [real(2, N, N), real(2, N, N).double()], 1)
    yield sample(cat, [real(2, N, 3).double(), real(2, N, N)], 2)
    yield sample(cat, [real(2, N, 4), real(2, 2, 4)], 1, dynamic=[(0, 1)])
    yield sample(cat, [real(2, 2, 4), real(2, N, 4)], 1, dynamic=[(1, 1)])
    yield sample(cat, [real(2, N, 4), real(2, N, 4)], 2, dynamic=[(0, 1), (1, 1)])
    yield sample(cat, [real(2, 5, 4), real(2, 7, 4)], 1, dynamic=[(0, 1), (1, 1)])


def scatters() -> Iterator[Sample]:
    for dim in (0, 1, -1):
        for start, stop, step in ((1, 4, 1), (0, N, 2), (None, None, 1)):
            taken = len(range(*slice(start, stop, step).indices(N)))
            size = [N, N, N]
            size[dim] = taken
            yield sample(aten.slice_scatter.default, real(N, N, N), real(*size), dim, start, stop, step)
        yield sample(aten.select_scatter.default, strided(N, N, N), real(N, N), dim, 2)
        yield sample(aten.select_scatter.default, real(N, N, N), strided(N, N), dim, -1)
        for size in ([N, N, N], [2, N, N], [N, 2, 3]):
            yield sample(aten.scatter.src, real(N, N, N), dim, whole(N, *size), real(N, N, N))
            yield sample(aten.scatter.value, real(N, N, N), dim, whole(N, *size), 3.0)
    yield sample(aten.copy.default, real(2, N, N), real(N))
    yield sample(aten.copy.default, real(2, N, N), real(N, 1).double())


def windows() -> Iterator[Sample]:
    op, channels = aten.conv1d.default, N
    for padding, kernel in ((0, 1), (0, 3), (2, 3), (3, 4), (1, 3), (0, N)):
        yield sample(
            op, real(2, channels, N + 3), real(channels, 1, kernel), real(channels), [1], [padding], [1], channels
        )
        yield sample(op, strided(2, channels, N), real(4, channels, kernel), None, [1], [padding])
    yield sample(op, real(2, N, 3 * N), real(N, 1, 3), None, [1], [4], [2], N)
    yield sample(op, real(2, N, 3 * N), real(N, 1, 3), None, [2], [2], [1], N)
    yield sample(op, real(N, 2 * N), real(4, N, 3), None, [1], [2])
    yield sample(op, real(2, N, 9), real(N, 1, 4), None, [1], [3], [1], N, dynamic=[(0, 2)])
    for dim in (0, 1, -1):
        yield sample(aten.unfold.default, real(N, N, N), dim, 2, 1)
        yield sample(aten.unfold.default, strided(N, N, N), dim, 3, 2)


def scans() -> Iterator[Sample]:
    """Recurrences: [batch, rows, heads, entries], or [batch, channels, rows] of the selective scan."""
    ops = torch.ops.ridgefill
    for state in (None, real(2, N, 3, 4)):
        query, key, value = real(2, N, N, 3), strided(2, N, N, 3), real(2, N, N, 4)
        decay = -real(2, N, N).abs()
        gate = real(2, N, N).sigmoid()
        yield sample(ops.gated_delta_rule.default, query, key, value, decay, gate, state, 0.5, True)
        yield sample(ops.linear_attention.default, query, key, value, decay, state)
    for state in (None, real(2, N, 4)):
        x, step = real(2, N, N), real(2, N, N).sigmoid()
        yield sample(ops.selective_scan.default, x, step, -real(N, 4).abs(), real(2, 4, N), real(2, 4, N), state)
    for state in (None, real(2, N)):
        yield sample(ops.linear_recurrence.default, real(2, N, N), real(2, N, N).sigmoid(), state, -1)
    memory = real(2, N, N, 3), strided(2, N, N, 3), real(2, N, N, 4), real(2, N, N), real(2, N, N)
    yield sample(ops.mlstm.default, *memory, None, None, None, 0.5, 1e-3)
    yield sample(ops.wkv.default, -real(N).abs(), real(N), real(2, N, N), real(2, N, N), None, -1)


def cuts() -> Iterator[Sample]:
    for dim in (0, 1, -1):
        yield sample(aten.split.Tensor, real(N, N, N), 4, dim)
        yield sample(aten.split_with_sizes.default, strided(N, N, N), [1, 2, 3], dim)
        yield sample(aten.chunk.default, real(N, N, N), 2, dim)
        yield sample(aten.unsafe_chunk.default, real(N, N, N), 2, dim)
        yield sample(aten.unsafe_split.Tensor, strided(N, N, N), 4, dim)
    yield sample(aten.split.Tensor, real(N, N), 2)
    yield sample(aten.split_with_sizes.default, real(2, N, N), [2, 4], -1, dynamic=[(0, 1)])
    yield sample(aten.chunk.default, real(2, N, N), 3, -1, dynamic=[(0, 1)])
    for repeats in ([1, 2, 1], [2, 1, 1], [1, 1, N], [1, 1, 1], [2, 1, 1, 1], [1, 2, 1, 1], [1, 1, 1, 1]):
        yield sample(aten.repeat.default, real(2, N, N), repeats)
    for amounts in (
        [1, 0],
        [0, 0, 2, 0],
        [0, 0, 0, 1],
        [1, 1, 0, 0],
        [0, 0, -2, 0],
        [0, 0, 1, -1],
        [0, 0, 2, -3],
        [0, 0, 1, 1, 0, 0],
    ):
        yield sample(aten.constant_pad_nd.default, strided(2, N, N), amounts, 7.0)
        yield sample(aten.pad.default, real(2, N, N), amounts)
    yield sample(aten.pad.default, real(2, N, N), [1, 2], "reflect")
    yield sample(aten.pad.default, real(2, N, N), [1, 2], "replicate")


def look_ups() -> Iterator[Sample]:
    for shape in ((2, N), (N,), (1, 1), (2, N, N)):
        yield sample(aten.embedding.default, real(N, N), whole(N, *shape))
    yield sample(aten.embedding.default, real(9, N), whole(9, N, 2).T, 0)
    x, i, j = real(N, N, N), whole(N, N), whole(N, N, N)
    choices: list[list[torch.Tensor | None]] = [
        [i],
        [None, i],
        [None, None, i],
        [j],
        [None, j],
        [i, i],
        [i, j],
        [None, j, i],
        [whole(N, N, 1), i],
        [whole(N, N, 1), whole(N, 1, N)],
        [whole(N), i],
        [whole(N)],
        [None, whole(N)],
        [whole(N, 1)],
        [whole(N, 1), j],
        [i, None, i],
        [i, None, j],
    ]
    for indices in choices:
        yield sample(aten.index.Tensor, x, indices)
        yield sample(aten.index.Tensor, strided(N, N, N, N), indices)
    for dim in (0, 1, -1):
        yield sample(aten.gather.default, real(N, N, N), dim, whole(N, N, N, N))
        yield sample(aten.gather.default, real(N, N, N), dim, whole(N, 2, 3, 4))
        yield sample(aten.gather.default, strided(2, N, N), dim, whole(2, 2, N, 1))
    yield sample(aten.one_hot.default, whole(N, 2, N), N)
    yield sample(aten.one_hot.default, whole(N, N), N)


def untagged() -> Iterator[Sample]:
    """Elementwise ops that lack the tag."""
    for op in (
        aten.multiply.Tensor,
        aten.divide.Tensor,
        aten.polar.default,
        aten.subtract.Tensor,
        aten.floor_divide.default,
    ):
        yield from pointwise(op)
    for op in (aten.log_sigmoid.default, aten.hardswish.default, aten.negative.default):
        yield from pointwise(op)
    for op in (aten.__and__.Tensor, aten.__or__.Tensor):
        yield sample(op, flags(2, N, N), flags(N, 1))
        yield sample(op, flags(1, 1, N), flags(2, N, 1))
    for chosen in (flags(2, N, N), flags(N, 1)):
        yield sample(aten.where.Scalar, chosen, 1.0, 0.0)
        yield sample(aten.where.ScalarSelf, chosen, 1.0, strided(2, N, N))
        yield sample(aten.where.ScalarOther, chosen, real(2, 1, N), 0.0)
        yield sample(aten.masked_fill.Tensor, real(2, N, N), chosen, real())
    yield sample(aten.expand_as.default, real(2, 1, N), real(2, N, N))
    yield sample(aten.expand_as.default, real(N), strided(2, N, N))
    yield sample(aten.expand_as.default, real(N, 1), real(1, N, N))
    for shape in ((2, N, N, 2), (N, 2), (1, 2, 2)):
        yield sample(aten.view_as_complex.default, real(*shape))
        yield sample(aten.view_as_real.default, torch.complex(real(*shape), real(*shape)))
        yield sample(aten.view_as_real.default, torch.complex(strided(*shape), strided(*shape)))


FAMILIES = (
    untagged,
    elementwise,
    factories,
    reductions,
    along,
    norms,
    products,
    einsums,
    attentions,
    views,
    expansions,
    permutations,
    single_dims,
    slices,
    joints,
    scatters,
    windows,
    scans,
    cuts,
    look_ups,
)


def spread() -> Iterator[Sample]:
    """Pointwise calls that schemas do not show: operands by name, none at all, of symbolic sizes."""
    x = real(2, N, N)
    for op in (aten.clamp.Tensor, aten.clip.Tensor):
        yield sample(op, x, real(N, 1), None)
        yield sample(op, x, min=real(N))
        yield sample(op, x, max=strided(2, 1, N))
    for op in (aten.clamp.default, aten.clip.default):
        yield sample(op, x, -0.5, 0.5)
        yield sample(op, x, max=0.0)
    yield sample(aten.add.Tensor, x, real(N, 1), alpha=0.5)
    yield sample(aten.mul.Tensor, real(1, N, 1), real(2, 1, N))
    yield sample(aten.where.self, flags(N, N), real(2, N, N), real())
    yield sample(aten.masked_fill.Scalar, x, flags(N, 1), -1.0)
    yield sample(aten.add.Tensor, x, real(N, 1), dynamic=[(0, 1), (1, 0)])
    yield sample(aten.add.Tensor, x, real(1, 1), dynamic=[(0, 1)])
    yield sample(aten.add.Tensor, real(1, N), real(N, 1), dynamic=[(0, 1), (1, 0)])
    yield sample(aten.mul.Tensor, real(2, 5, N), real(5, N), dynamic=[(0, 1), (1, 0)])
    yield sample(aten.mul.Tensor, real(2, 5, 7), real(5, 7), dynamic=[(0, 1), (0, 2), (1, 0), (1, 1)])


def pointwise(op: Any) -> Iterator[Sample]:
    """Calls of an op that is tagged pointwise, made from its schema: operands of every rank, broadcast."""
    forms: dict[int, list[tuple[tuple[int, ...], ...]]] = {
        1: [((2, N, N),), ((N,),), ((1, N, 1),)],
        2: [((2, N, N), (N,)), ((N, 1), (2, N, N)), ((2, 1, N), (N, 1)), ((2, N, N), ()), ((1, N), (N, 1))],
        3: [((2, N, N), (N, 1), (N,)), ((N,), (2, 1, N), (N, N)), ((2, N, N), (2, N, N), (1, N, 1))],
    }
    wanted = [a for a in op._schema.arguments if not a.has_default_value()]
    tensors = [a for a in wanted if str(a.type) == "Tensor"]
    for make in (lambda *s: real(*s).sigmoid(), lambda *s: whole(3, *s), flags):
        found = []
        for shapes in forms[max(1, len(tensors))]:
            operands = iter([make(*size) for size in shapes])
            given = {a.name: next(operands) if a in tensors else _SETTINGS.get(str(a.type)) for a in wanted}
            args = [given[a.name] for a in wanted if not a.kwarg_only]
            kwargs = {a.name: given[a.name] for a in wanted if a.kwarg_only}
            try:
                op(*args, **kwargs)
            except (RuntimeError, TypeError):
                continue
            found.append(Sample(op, tuple(args), kwargs))
        if found:
            yield from found
            return


_SETTINGS = {"number": 2, "int": 1, "float": 0.5, "bool": False}


@functools.cache
def by_op() -> dict[Any, list[Sample]]:
    """Every sample, by op."""
    found: dict[Any, list[Sample]] = {}
    for family in FAMILIES:
        for given in family():
            found.setdefault(given.op, []).append(given)
    return found
