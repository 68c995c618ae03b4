"""Ridge regression in closed form: the sums that calibration keeps, and one solver for every penalty.

A map predicts the input `y` of a late layer from the split state `x`. Over rows `t` of weights `w`,

    min_{A,b}  Σ_t w_t ||y_t - (A x_t + b)||² + α ||A||²_F       α = penalty · tr(Xᶜᵀ W Xᶜ) / d_in
    A = Yᶜᵀ W Xᶜ (Xᶜᵀ W Xᶜ + α I)⁻¹      b = μ_y - A μ_x         ᶜ: centred; the offset is not penalised

Only the sums `Σw, Σwx, XᵀWX, Σwy, XᵀWY` are needed, so memory does not grow with the rows, and sums of
different texts add. Everything is float64: centring subtracts nearly equal numbers
(`Xᶜᵀ W Xᶜ = XᵀWX - Σw μ_x μ_xᵀ`), which a residual stream with its few huge channels would not survive in
float32.

The weight of a row is 1 over its mean square length in the late layers. The paper's is 1, so that a row counts by its
square length. But some models have a layer that makes the first row of every text over a hundred times as long as any
other (an attention sink): 28,000 other rows then weigh no more than it does, and a map across that layer fits it alone.
A late layer's norm takes lengths away anyway: what it reads of a row is off by the error over the length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgefill_compile.errors import CalibrationError

DEFAULT_PENALTIES: tuple[float, ...] = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)


def weighted_sums(x: Tensor, y: Sequence[Tensor], by_length: bool = False) -> list[Tensor]:
    """`Σw, Σwx, XᵀWX`, and of each late layer `Σwy, XᵀWY`; plain torch, for it is written into graphs, too.

    Args:
        x: split state, `[rows, d_in]` float64.
        y: what is predicted of each late layer, `[rows, d_out]` float64.
        by_length: every row has the weight 1.
    """
    square = torch.stack([rows.square().sum(1) for rows in y]).mean(0)
    # Of a row of zeros there is nothing to learn; one with a NaN spoils the sums of its own layer alone.
    weights = torch.ones_like(square) if by_length else square.reciprocal().masked_fill(~(square > 0), 0)
    weighted = (x * weights[:, None]).T
    sums = [weights.sum(), weighted.sum(1), weighted @ x]
    for rows in y:
        sums += [weights @ rows, weighted @ rows]
    return sums


@dataclass(eq=False)
class RidgeStatistics:
    """Sums over rows from which the maps of one split are solved. All tensors are float64, on one device.

    Attributes:
        split: first late layer; `x` is the residual stream that enters it.
        rows: how many were summed; a float, because a weighted mixture need not hold a whole number of them.
        weight: `Σ w`.
        sum_x: `Σ w x`, `[d_in]`.
        xx: `Σ w x xᵀ`, `[d_in, d_in]`.
        sum_y: late layer -> `Σ w y`, `[d_out]`.
        xy: late layer -> `Σ w x yᵀ`, `[d_in, d_out]`.
    """

    split: int
    rows: float
    weight: float
    sum_x: Tensor
    xx: Tensor
    sum_y: dict[int, Tensor]
    xy: dict[int, Tensor]

    def __post_init__(self) -> None:
        d_in = self.sum_x.shape[0] if self.sum_x.ndim == 1 else -1
        fits = (
            self.xx.shape == (d_in, d_in)
            and self.sum_y.keys() == self.xy.keys()
            and all(self.xy[layer].shape == (d_in, *total.shape) for layer, total in self.sum_y.items())
            and all(total.ndim == 1 for total in self.sum_y.values())
        )
        if not fits:
            raise CalibrationError(f"sums of split {self.split} do not fit together: {_describe(self)}")
        if any(tensor.dtype != torch.float64 for tensor in self._tensors().values()):
            raise CalibrationError(f"sums of split {self.split} must be float64")

    @classmethod
    def from_rows(cls, split: int, x: Tensor, y: Mapping[int, Tensor], by_length: bool = False) -> RidgeStatistics:
        """The sums of `x` `[rows, d_in]` and, per late layer, `y` `[rows, d_out]`, of any float dtype.

        `by_length`: the paper's, in which every row has the weight 1.
        """
        late = sorted(y)
        sums = weighted_sums(x.double(), [y[layer].double() for layer in late], by_length)
        return cls.of_sums(split, x.shape[0], late, sums)

    @classmethod
    def of_sums(cls, split: int, rows: int, late: Sequence[int], sums: Sequence[Tensor]) -> RidgeStatistics:
        """Of what `weighted_sums` gave for some rows and, in this order, late layers."""
        return cls(
            split=split,
            rows=float(rows),
            weight=float(sums[0]),
            sum_x=sums[1],
            xx=sums[2],
            sum_y=dict(zip(late, sums[3::2], strict=True)),
            xy=dict(zip(late, sums[4::2], strict=True)),
        )

    def zeros_like(self) -> RidgeStatistics:
        """Sums over no rows, with the same split, layers, widths and device."""
        return RidgeStatistics(
            split=self.split,
            rows=0.0,
            weight=0.0,
            sum_x=torch.zeros_like(self.sum_x),
            xx=torch.zeros_like(self.xx),
            sum_y={layer: torch.zeros_like(total) for layer, total in self.sum_y.items()},
            xy={layer: torch.zeros_like(total) for layer, total in self.xy.items()},
        )

    @property
    def layers(self) -> tuple[int, ...]:
        """Late layers that have sums, ascending."""
        return tuple(sorted(self.sum_y))

    def add(self, other: RidgeStatistics, weight: float = 1.0) -> None:
        """Add `weight` times another text's sums, in place.

        To give `other` a share `s` of a mixture, whatever the row counts are:
        `weight = s / (1 - s) · self.weight / other.weight`.

        Raises:
            CalibrationError: the other sums are of another split, other layers or other widths.
        """
        mine, theirs = self._tensors(), other._tensors()
        same = self.split == other.split and mine.keys() == theirs.keys()
        if not same or any(mine[name].shape != theirs[name].shape for name in mine):
            raise CalibrationError(f"cannot add sums of {_describe(other)} to sums of {_describe(self)}")
        self.rows += weight * other.rows
        self.weight += weight * other.weight
        for name, total in mine.items():
            total.add_(theirs[name].to(total.device), alpha=weight)

    def first_nonfinite(self) -> int | None:
        """The lowest layer whose input held a NaN or an infinity, or None.

        Looks at `Σx` and `Σy` only: any row that spoils a product spoils them too, and float64 products of
        float32 values cannot overflow by themselves.
        """
        totals = {self.split: self.sum_x} | {layer: self.sum_y[layer] for layer in self.layers}
        finite = torch.stack([total.sum() for total in totals.values()]).isfinite().tolist()
        return next((layer for layer, good in zip(totals, finite, strict=True) if not good), None)

    def to_tensors(self) -> dict[str, Tensor]:
        """A flat dict for storage, of the sums' own tensors; `from_tensors` is its inverse."""
        scalars = {
            "split": torch.tensor(self.split, dtype=torch.int64),
            "rows": torch.tensor(self.rows, dtype=torch.float64),
            "weight": torch.tensor(self.weight, dtype=torch.float64),
        }
        return scalars | self._tensors()

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> RidgeStatistics:
        """Rebuild the sums from what `to_tensors` gave.

        Raises:
            CalibrationError: a tensor is missing, unknown, or of a shape or dtype that does not fit.
        """
        sum_y: dict[int, Tensor] = {}
        xy: dict[int, Tensor] = {}
        try:
            for name, tensor in tensors.items():
                kind, _, layer = name.partition(".")
                if layer:
                    {"sum_y": sum_y, "xy": xy}[kind][int(layer)] = tensor
            return cls(
                split=int(tensors["split"]),
                rows=float(tensors["rows"]),
                weight=float(tensors["weight"]),
                sum_x=tensors["sum_x"],
                xx=tensors["xx"],
                sum_y=sum_y,
                xy=xy,
            )
        except (KeyError, ValueError, RuntimeError) as error:
            raise CalibrationError(f"stored sums are not complete: {error!r}") from error

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {"sum_x": self.sum_x, "xx": self.xx}
        for layer in self.layers:
            tensors[f"sum_y.{layer}"] = self.sum_y[layer]
            tensors[f"xy.{layer}"] = self.xy[layer]
        return tensors


class RidgeSolver:
    """Maps of one split in closed form, at any penalty.

    With the eigendecomposition `Xᶜᵀ Xᶜ = V diag(w) Vᵀ`, done once (`O(d_in³)`), every layer and penalty is

        Aᵀ = V diag(1 / (w + α)) Vᵀ Xᶜᵀ Yᶜ

    A direction in which `w + α` is at rounding level (the rows do not vary there, and no penalty steadies it)
    gets no weight: `penalty=0` gives the least-squares map of smallest norm; rows all alike give their mean.

    Args:
        statistics: sums over at least one row. They are read, not changed.

    Raises:
        CalibrationError: no rows, or sums that are not finite.
    """

    def __init__(self, statistics: RidgeStatistics) -> None:
        if not statistics.weight > 0:
            raise CalibrationError(f"no rows were summed for split {statistics.split}")
        if not all(bool(tensor.isfinite().all()) for tensor in statistics._tensors().values()):
            raise CalibrationError(f"sums of split {statistics.split} are not finite")
        self.statistics = statistics
        self._mean_x = statistics.sum_x / statistics.weight
        scatter = statistics.xx - torch.outer(statistics.sum_x, self._mean_x)
        scatter = (scatter + scatter.T) / 2
        values, self._vectors = torch.linalg.eigh(scatter)
        self._values = values.clamp(min=0)
        self._mean_value = self._values.mean()
        # Rounding of `xx` along a direction `v` is about `eps (Σ |v_i| rms_i)²`: a huge channel blurs only
        # the directions that hold it. The decomposition adds about `eps` of its largest value to each.
        rms = statistics.xx.diagonal().clamp(min=0).sqrt()
        noise = (self._vectors.abs().T @ rms).square() + len(values) * self._values[-1]
        self._noise = 8 * torch.finfo(torch.float64).eps * noise
        self._projected: tuple[int, Tensor] | None = None

    def solve(self, layer: int, penalty: float) -> tuple[Tensor, Tensor]:
        """The map of one late layer.

        Args:
            layer: a late layer that has sums.
            penalty: `λ >= 0`, relative to the mean variance of the split state, so that one value means the
                same on every model.

        Returns:
            `(matrix [d_out, d_in], offset [d_out])`, float64: `y ≈ matrix @ x + offset`.

        Raises:
            CalibrationError: the layer has no sums, or the penalty is negative or not finite.
        """
        if layer not in self.statistics.sum_y:
            have = ", ".join(map(str, self.statistics.layers)) or "none"
            raise CalibrationError(f"no sums for layer {layer} at split {self.statistics.split}; have {have}")
        if not 0 <= penalty < float("inf"):
            raise CalibrationError(f"a penalty must be a finite number of at least 0, not {penalty!r}")
        damped = self._values + penalty * self._mean_value
        shrunk = torch.where(damped > self._noise, 1 / damped, 0.0)
        matrix = (self._vectors @ (shrunk[:, None] * self._project(layer))).T.contiguous()
        offset = self.statistics.sum_y[layer] / self.statistics.weight - matrix @ self._mean_x
        return matrix, offset

    def _project(self, layer: int) -> Tensor:
        """`Vᵀ Xᶜᵀ Yᶜ` `[d_in, d_out]`, kept for the latest layer only: penalties are tried layer by layer."""
        if self._projected is None or self._projected[0] != layer:
            statistics = self.statistics
            cross = statistics.xy[layer] - torch.outer(self._mean_x, statistics.sum_y[layer])
            self._projected = (layer, self._vectors.T @ cross)
        return self._projected[1]


def _describe(statistics: RidgeStatistics) -> str:
    widths = {layer: list(total.shape) for layer, total in sorted(statistics.xy.items())}
    return f"split {statistics.split}, width {list(statistics.sum_x.shape)}, [d_in, d_out] by layer {widths}"
