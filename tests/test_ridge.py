from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ridgefill_compile.errors import CalibrationError
from ridgefill_compile.ridge import DEFAULT_PENALTIES, RidgeSolver, RidgeStatistics

SPLIT, LATE = 3, 5


def rows_of(seed: int, rows: int, d_in: int, d_out: int) -> tuple[Tensor, Tensor]:
    """Correlated rows away from the origin, as a residual stream has them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, d_in, generator=generator, dtype=torch.float64)
    x = x @ torch.randn(d_in, d_in, generator=generator, dtype=torch.float64) + 3
    y = x @ torch.randn(d_in, d_out, generator=generator, dtype=torch.float64)
    return x, y + torch.randn(rows, d_out, generator=generator, dtype=torch.float64) - 7


def fitted(x: Tensor, y: Tensor, penalty: float, by_length: bool = True) -> tuple[Tensor, Tensor]:
    return RidgeSolver(RidgeStatistics.from_rows(SPLIT, x, {LATE: y}, by_length)).solve(LATE, penalty)


def reference(x: Tensor, y: Tensor, penalty: float, weights: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The definition, minimised as least squares over all unknowns, with the penalty as further rows.

    No centring, no normal equations: the offset belongs to a column of ones that the penalty skips.
    """
    rows, d_in = x.shape
    root = weights.sqrt().numpy()[:, None]
    centred = x - (weights @ x) / weights.sum()
    alpha = penalty * float(weights @ (centred * centred).sum(1)) / d_in
    left = np.block(
        [[root * x.numpy(), root * np.ones((rows, 1))], [np.sqrt(alpha) * np.eye(d_in), np.zeros((d_in, 1))]]
    )
    right = np.concatenate([root * y.numpy(), np.zeros((d_in, y.shape[1]))])
    solution = np.linalg.lstsq(left, right, rcond=None)[0]
    return solution[:-1].T, solution[-1]


@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 60),
    d_in=st.integers(1, 12),
    d_out=st.integers(1, 9),
    penalty=st.sampled_from((*DEFAULT_PENALTIES, 10.0)),
    by_length=st.booleans(),
)
def test_solution_is_the_minimum_of_the_definition(seed, rows, d_in, d_out, penalty, by_length):
    x, y = rows_of(seed, rows, d_in, d_out)
    weights = torch.ones(rows, dtype=torch.float64) if by_length else 1 / y.square().sum(1)
    matrix, offset = fitted(x, y, penalty, by_length)
    expected_matrix, expected_offset = reference(x, y, penalty, weights)
    if rows > 1:  # one row has no variance, hence no penalty: the reference is then free to choose
        np.testing.assert_allclose(matrix.numpy(), expected_matrix, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(offset.numpy(), expected_offset, rtol=1e-6, atol=1e-5)
    expected = x.numpy() @ expected_matrix.T + expected_offset
    np.testing.assert_allclose(x @ matrix.T + offset, expected, atol=1e-5)
    assert matrix.shape == (d_out, d_in)
    assert offset.shape == (d_out,)
    assert matrix.dtype == offset.dtype == torch.float64


def test_one_decomposition_serves_every_penalty_in_any_order():
    x, y = rows_of(0, 40, 6, 4)
    z = y.flip(1) * 2
    solver = RidgeSolver(RidgeStatistics.from_rows(SPLIT, x, {LATE: y, LATE + 1: z}))
    for layer, penalty in [(LATE, 0.1), (LATE + 1, 0.1), (LATE, 1e-3), (LATE + 1, 3.0), (LATE, 0.1)]:
        expected, _ = reference(x, y if layer == LATE else z, penalty, 2 / (y.square() + z.square()).sum(1))
        np.testing.assert_allclose(solver.solve(layer, penalty)[0].numpy(), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_linear_world_is_recovered_exactly(scale):
    generator = torch.Generator().manual_seed(1)
    x = scale * (torch.randn(200, 16, generator=generator, dtype=torch.float64) + 2)
    truth = torch.randn(10, 16, generator=generator, dtype=torch.float64)
    offset = scale * torch.randn(10, generator=generator, dtype=torch.float64)
    solved, solved_offset = fitted(x, x @ truth.T + offset, penalty=0)
    torch.testing.assert_close(solved, truth, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(solved_offset, offset, rtol=1e-9, atol=scale * 1e-9)


def test_penalty_does_not_depend_on_the_scale_of_the_state():
    x, y = rows_of(2, 50, 5, 3)
    matrix, offset = fitted(x, y, 0.1)
    scaled, same_offset = fitted(x * 1000, y, 0.1)
    torch.testing.assert_close(scaled * 1000, matrix)
    torch.testing.assert_close(same_offset, offset)


def test_offset_is_not_penalised():
    x, y = rows_of(3, 50, 5, 3)
    matrix, offset = fitted(x, y, 1e9)
    assert matrix.abs().max() < 1e-6
    torch.testing.assert_close(offset, y.mean(0), rtol=1e-5, atol=1e-5)


def test_huge_channels_do_not_drown_the_others():
    """A few channels of a residual stream are thousands of times the rest, and far from zero."""
    x, _ = rows_of(4, 400, 24, 1)
    x[:, 3] = x[:, 3] * 1e3 + 2e4
    truth = torch.randn(6, 24, dtype=torch.float64)
    solved, _ = fitted(x, x @ truth.T + 5, penalty=0)
    torch.testing.assert_close(solved, truth, rtol=1e-5, atol=1e-5)


def test_one_long_row_does_not_drown_the_others():
    """Its target has nothing to do with its state, and is 200 times as long: an attention sink."""
    x, _ = rows_of(4, 400, 24, 1)
    truth = torch.randn(6, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = x @ truth.T + 5
    y[7] = 200 * y.norm(dim=1).median() * torch.eye(6, dtype=torch.float64)[0]
    errors = {}
    for by_length in (False, True):
        solved, offset = fitted(x, y, 0, by_length)
        others = torch.arange(400) != 7
        errors[by_length] = float((x @ solved.T + offset - y)[others].norm() / y[others].norm())
    assert errors[False] < 0.01
    assert errors[True] > 0.5


def test_a_row_of_zeros_changes_nothing():
    x, y = rows_of(6, 40, 5, 3)
    y[11] = 0
    rest = torch.arange(40) != 11
    for got, expected in zip(fitted(x, y, 0.1, False), fitted(x[rest], y[rest], 0.1, False), strict=True):
        torch.testing.assert_close(got, expected)


class TestDegenerate:
    def test_constant_column_gets_no_weight(self):
        x, y = rows_of(5, 50, 6, 4)
        x[:, 2] = 1234.5
        for penalty in (0.0, 0.01):
            matrix, offset = fitted(x, y, penalty)
            assert matrix[:, 2].abs().max() < 1e-8
            kept = [0, 1, 3, 4, 5]
            # Same prediction as without the column; `α` is a mean over columns, the dead one included.
            without, without_offset = fitted(x[:, kept], y, penalty * 5 / 6)
            torch.testing.assert_close(matrix[:, kept], without, rtol=1e-6, atol=1e-8)
            torch.testing.assert_close(offset, without_offset, rtol=1e-6, atol=1e-6)

    def test_no_variance_at_all_predicts_the_mean(self):
        y = torch.randn(20, 3, dtype=torch.float64)
        for penalty in (0.0, 0.1):
            matrix, offset = fitted(torch.full((20, 4), 0.1, dtype=torch.float64), y, penalty)
            assert matrix.count_nonzero() == 0
            torch.testing.assert_close(offset, y.mean(0))

    def test_rank_deficient_rows_give_the_smallest_least_squares_map(self):
        x, y = rows_of(6, 50, 4, 3)
        x = torch.cat([x, x[:, :2] + x[:, 2:]], 1)
        matrix, offset = fitted(x, y, 0.0)
        centred, target = (x - x.mean(0)).numpy(), (y - y.mean(0)).numpy()
        smallest = np.linalg.lstsq(centred, target, rcond=1e-12)[0]
        np.testing.assert_allclose(matrix.numpy(), smallest.T, atol=1e-7)
        np.testing.assert_allclose(x @ matrix.T + offset - y.mean(0), centred @ smallest, atol=1e-7)

    def test_fewer_rows_than_channels_interpolate(self):
        x, y = rows_of(7, 5, 20, 3)
        matrix, offset = fitted(x, y, 0.0)
        torch.testing.assert_close(x @ matrix.T + offset, y, rtol=1e-7, atol=1e-7)

    def test_single_row(self):
        matrix, offset = fitted(torch.ones(1, 4), torch.full((1, 2), 3.0), 0.1)
        assert matrix.count_nonzero() == 0
        torch.testing.assert_close(offset, torch.full((2,), 3.0, dtype=torch.float64))


class TestSums:
    @given(seed=st.integers(0, 1000), cut=st.integers(1, 29), weight=st.floats(0.1, 8))
    def test_sums_add_and_mix(self, seed, cut, weight):
        """Sums of parts are the sums of the whole; a weight counts a part's rows that many times."""
        x, y = rows_of(seed, 30, 4, 3)
        total = RidgeStatistics.from_rows(SPLIT, x[:cut], {LATE: y[:cut]})
        total.add(RidgeStatistics.from_rows(SPLIT, x[cut:], {LATE: y[cut:]}), weight)
        times = torch.tensor([1.0] * cut + [weight] * (30 - cut), dtype=torch.float64)[:, None]
        weights = times / y.square().sum(1, keepdim=True)
        assert total.rows == pytest.approx(float(times.sum()))
        assert total.weight == pytest.approx(float(weights.sum()))
        torch.testing.assert_close(total.sum_x, (weights * x).sum(0))
        torch.testing.assert_close(total.xx, x.T @ (weights * x))
        torch.testing.assert_close(total.sum_y[LATE], (weights * y).sum(0))
        torch.testing.assert_close(total.xy[LATE], x.T @ (weights * y))

    def test_weight_two_equals_seeing_the_text_twice(self):
        x, y = rows_of(8, 30, 4, 3)
        total = RidgeStatistics.from_rows(SPLIT, x[:10], {LATE: y[:10]})
        total.add(RidgeStatistics.from_rows(SPLIT, x[10:], {LATE: y[10:]}), weight=2)
        repeated = fitted(torch.cat([x, x[10:]]), torch.cat([y, y[10:]]), 0.03, by_length=False)
        for got, expected in zip(RidgeSolver(total).solve(LATE, 0.03), repeated, strict=True):
            torch.testing.assert_close(got, expected)

    def test_add_changes_only_the_receiver(self):
        x, y = rows_of(9, 8, 3, 2)
        part = RidgeStatistics.from_rows(SPLIT, x, {LATE: y})
        before = {name: tensor.clone() for name, tensor in part.to_tensors().items()}
        total = part.zeros_like()
        total.add(part)
        total.add(part, 2)
        for name, tensor in part.to_tensors().items():
            assert torch.equal(tensor, before[name])
        assert total.rows == 24
        assert total.weight == pytest.approx(3 * part.weight)

    def test_low_precision_rows_are_summed_in_double(self):
        x = torch.full((4096, 1), 1.0009765625, dtype=torch.float32)
        total = RidgeStatistics.from_rows(SPLIT, x, {LATE: x.bfloat16()}, by_length=True)
        assert total.sum_x.item() == 4096 * 1.0009765625
        assert total.xy[LATE].dtype == torch.float64

    def test_other_widths_layers_or_split_are_refused(self):
        x, y = rows_of(10, 8, 4, 3)
        total = RidgeStatistics.from_rows(SPLIT, x, {LATE: y})
        for other in (
            RidgeStatistics.from_rows(SPLIT + 1, x, {LATE: y}),
            RidgeStatistics.from_rows(SPLIT, x[:, :1], {LATE: y}),
            RidgeStatistics.from_rows(SPLIT, x, {LATE: y[:, :1]}),
            RidgeStatistics.from_rows(SPLIT, x, {LATE + 1: y}),
        ):
            with pytest.raises(CalibrationError, match="cannot add"):
                total.add(other)

    def test_storage_round_trip(self):
        x, y = rows_of(11, 8, 4, 3)
        total = RidgeStatistics.from_rows(SPLIT, x, {LATE: y, LATE + 6: y[:, :2]})
        tensors = total.to_tensors()
        again = RidgeStatistics.from_tensors(tensors)
        assert (again.split, again.rows, again.weight) == (SPLIT, 8.0, total.weight)
        assert again.layers == (LATE, LATE + 6)
        assert again.to_tensors().keys() == tensors.keys()
        assert all(torch.equal(again.to_tensors()[name], tensor) for name, tensor in tensors.items())

    @pytest.mark.parametrize("missing", ["split", "rows", "weight", "sum_x", "xx", f"sum_y.{LATE}", f"xy.{LATE}"])
    def test_storage_with_a_part_missing_is_refused(self, missing):
        x, y = rows_of(12, 8, 4, 3)
        tensors = RidgeStatistics.from_rows(SPLIT, x, {LATE: y}).to_tensors()
        del tensors[missing]
        with pytest.raises(CalibrationError):
            RidgeStatistics.from_tensors(tensors)

    def test_storage_with_foreign_shapes_or_dtypes_is_refused(self):
        x, y = rows_of(13, 8, 4, 3)
        tensors = RidgeStatistics.from_rows(SPLIT, x, {LATE: y}).to_tensors()
        for damage in (
            {"xx": torch.zeros(4, 3, dtype=torch.float64)},
            {"xx": torch.zeros(4, 4)},
            {f"xy.{LATE}": torch.zeros(3, 3, dtype=torch.float64)},
            {"sum_x": torch.tensor(0.0, dtype=torch.float64)},
            {"other.3": torch.zeros(1, dtype=torch.float64)},
            {"xy.one": torch.zeros(1, dtype=torch.float64)},
        ):
            with pytest.raises(CalibrationError):
                RidgeStatistics.from_tensors(tensors | damage)

    @pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
    def test_first_spoilt_layer_is_named(self, poison):
        x, y = rows_of(14, 8, 4, 3)
        bad = y.clone()
        bad[3, 1] = poison
        clean = RidgeStatistics.from_rows(SPLIT, x, {LATE: y})
        assert clean.first_nonfinite() is None
        late = RidgeStatistics.from_rows(SPLIT, x, {LATE + 2: bad, LATE + 1: bad, LATE: y})
        assert late.first_nonfinite() == LATE + 1
        x[0, 0] = poison
        assert RidgeStatistics.from_rows(SPLIT, x, {LATE: y}).first_nonfinite() == SPLIT

    def test_infinities_that_cancel_are_still_seen(self):
        x, y = rows_of(15, 8, 4, 3)
        y[0, 0], y[1, 0] = float("inf"), -float("inf")
        assert RidgeStatistics.from_rows(SPLIT, x, {LATE: y}).first_nonfinite() == LATE


class TestRefused:
    def test_no_rows(self):
        x, y = rows_of(16, 8, 4, 3)
        with pytest.raises(CalibrationError, match="no rows"):
            RidgeSolver(RidgeStatistics.from_rows(SPLIT, x, {LATE: y}).zeros_like())

    def test_sums_that_are_not_finite(self):
        x, y = rows_of(17, 8, 4, 3)
        statistics = RidgeStatistics.from_rows(SPLIT, x, {LATE: y})
        statistics.xy[LATE][0, 0] = float("nan")
        with pytest.raises(CalibrationError, match="not finite"):
            RidgeSolver(statistics)

    def test_unknown_layer(self):
        x, y = rows_of(18, 8, 4, 3)
        solver = RidgeSolver(RidgeStatistics.from_rows(SPLIT, x, {LATE: y}))
        with pytest.raises(CalibrationError, match=r"layer 4 at split 3; have 5"):
            solver.solve(4, 0.1)

    @pytest.mark.parametrize("penalty", [-1e-9, float("nan"), float("inf")])
    def test_penalty_out_of_range(self, penalty):
        x, y = rows_of(19, 8, 4, 3)
        with pytest.raises(CalibrationError, match="penalty"):
            fitted(x, y, penalty)
