from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor import metrics

from ridgefill_compile.errors import MapsError
from ridgefill_compile.int8 import GROUP, dequantise, group_count, quantise


def random_matrix(rows: int, columns: int, seed: int = 0, heavy: bool = False) -> Tensor:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return values**5 if heavy else values


def each_groups_largest(matrix: Tensor) -> Tensor:
    """For each weight, the largest |weight| of its group."""
    parts = [part.abs().amax(1, keepdim=True).expand_as(part) for part in matrix.split(GROUP, dim=1)]
    return torch.cat(parts, 1)


class TestQuantise:
    @given(
        rows=st.integers(1, 5),
        columns=st.integers(1, 3 * GROUP),
        seed=st.integers(0, 1000),
        size=st.integers(-30, 30),
        heavy=st.booleans(),
    )
    def test_no_weight_is_off_by_more_than_half_a_scale(self, rows, columns, seed, size, heavy):
        matrix = random_matrix(rows, columns, seed, heavy) * 10.0**size
        codes, scales = quantise(matrix)
        assert (codes.dtype, codes.shape) == (torch.int8, matrix.shape)
        assert (scales.dtype, scales.shape) == (torch.bfloat16, (rows, group_count(columns)))
        off = (dequantise(codes, scales).double() - matrix.double()).abs()
        assert (off <= each_groups_largest(matrix).double() * (1 + 2**-8) / 254).all()
        assert off.max() <= 0.00395 * matrix.abs().max()

    @given(columns=st.integers(1, 2 * GROUP), seed=st.integers(0, 1000))
    def test_again_gives_the_same(self, columns, seed):
        first = quantise(random_matrix(3, columns, seed))
        second = quantise(dequantise(*first))
        assert torch.equal(first.codes, second.codes)
        assert torch.equal(first.scales, second.scales)

    def test_scales_are_rounded_first_and_ties_go_to_even(self):
        matrix = torch.zeros(1, GROUP)
        matrix[0, :6] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5])
        codes, scales = quantise(matrix)
        assert scales.tolist() == [[1.0]]
        assert codes[0, :6].tolist() == [127, 0, 2, 2, 0, -2]
        matrix[0, 0] = 127 * (1 + 2**-9)  # its scale is a tie, and is rounded down
        codes, scales = quantise(matrix)
        assert scales.tolist() == [[1.0]]
        assert codes[0, 0] == 127

    def test_groups_are_of_one_row_and_128_columns(self):
        matrix = torch.ones(2, GROUP + 3)
        matrix[0, GROUP:] = 1000.0
        matrix[1, :GROUP] = 0.0
        codes, scales = quantise(matrix)
        assert scales.float().tolist() == pytest.approx(torch.tensor([[1 / 127, 1000 / 127], [1, 1 / 127]]), rel=2**-8)
        assert codes[0].tolist() == [127] * (GROUP + 3)
        assert codes[1].tolist() == [0] * GROUP + [127] * 3

    def test_zeros_and_what_no_scale_is_small_enough_for(self):
        for value in (0.0, -0.0, 1e-45):
            codes, scales = quantise(torch.full((2, 5), value))
            assert scales.tolist() == [[1.0], [1.0]]
            assert not codes.any()

    @pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e300])
    def test_what_is_not_finite_is_refused(self, value):
        matrix = torch.zeros(3, 200, dtype=torch.float64)
        matrix[1, 150] = value
        with pytest.raises(MapsError, match="NaN or infinite"):
            quantise(matrix)

    def test_any_float_dtype(self):
        matrix = random_matrix(4, 150).bfloat16()
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            assert torch.equal(quantise(matrix.to(dtype)).codes, quantise(matrix).codes)


class TestDequantise:
    @pytest.mark.parametrize("columns", [5, GROUP, GROUP + 1, 3 * GROUP])
    def test_is_the_product_rounded_once(self, columns):
        codes, scales = quantise(random_matrix(4, columns))
        exact = codes.double() * scales.double().repeat_interleave(GROUP, 1)[:, :columns]
        assert torch.equal(dequantise(codes, scales).double(), exact)
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            assert torch.equal(dequantise(codes, scales, dtype), exact.to(dtype))

    @pytest.mark.parametrize("columns", [3 * GROUP, 2 * GROUP + 40])
    def test_compiles_to_one_kernel(self, columns):
        codes, scales = quantise(random_matrix(64, columns))
        metrics.reset()
        compiled = torch.compile(dequantise, fullgraph=True, dynamic=False)
        assert torch.equal(compiled(codes, scales, torch.bfloat16), dequantise(codes, scales, torch.bfloat16))
        assert metrics.generated_kernel_count == 1
