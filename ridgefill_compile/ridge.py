"""Ridge regression in closed form: the sums that calibration keeps, and one solver for every penalty.

A map predicts the input `y` of a late layer from the split state `x`. Over `n` rows,

    min_{A,b}  Σ_t ||y_t - (A x_t + b)||² + α ||A||²_F           α = penalty · tr(Xᶜᵀ Xᶜ) / d_in
    A = Yᶜᵀ Xᶜ (Xᶜᵀ Xᶜ + α I)⁻¹      b = μ_y - A μ_x             ᶜ: centred; the offset is not penalised

Only the sums `n, Σx, XᵀX, Σy, XᵀY` are needed, so memory does not grow with the rows, and sums of
different texts add. Everything is float64: centring subtracts nearly equal numbers
(`Xᶜᵀ Xᶜ = XᵀX - n μ_x μ_xᵀ`), which a residual stream with its few huge channels would not survive in
float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgefill_compile.errors import CalibrationError

DEFAULT_PENALTIES: tuple[float, ...] = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)


@dataclass(eq=False)
class RidgeStatistics:
    """Sums over rows from which the maps of one split are solved. All tensors are float64, on one device.

    Attributes:
        split: first late layer; `x` is the residual stream that enters it.
        count: rows summed; a float, because a weighted mixture need not hold a whole number of them.
        sum_x: `Σ x`, `[d_in]`.
        xx: `Σ x xᵀ`, `[d_in, d_in]`.
        sum_y: late layer -> `Σ y`, `[d_out]`.
        xy: late layer -> `Σ x yᵀ`, `[d_in, d_out]`.
    """

    split: int
    count: float
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
    def from_rows(cls, split: int, x: Tensor, y: Mapping[int, Tensor]) -> RidgeStatistics:
        """The sums of `x` `[rows, d_in]` and, per late layer, `y` `[rows, d_out]`, of any float dtype."""
        x = x.double()
        y = {layer: rows.double() for layer, rows in y.items()}
        return cls(
            split=split,
            count=float(x.shape[0]),
            sum_x=x.sum(0),
            xx=x.T @ x,
            sum_y={layer: rows.sum(0) for layer, rows in y.items()},
            xy={layer: x.T @ rows for layer, rows in y.items()},
        )

    def zeros_like(self) -> RidgeStatistics:
        """Sums over no rows, with the same split, layers, widths and device."""
        return RidgeStatistics(
            split=self.split,
            count=0.0,
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
        `weight = s / (1 - s) · self.count / other.count`.

        Raises:
            CalibrationError: the other sums are of another split, other layers or other widths.
        """
        mine, theirs = self._tensors(), other._tensors()
        same = self.split == other.split and mine.keys() == theirs.keys()
        if not same or any(mine[name].shape != theirs[name].shape for name in mine):
            raise CalibrationError(f"cannot add sums of {_describe(other)} to sums of {_describe(self)}")
        self.count += weight * other.count
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
            "count": torch.tensor(self.count, dtype=torch.float64),
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
                count=float(tensors["count"]),
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
        if not statistics.count > 0:
            raise CalibrationError(f"no rows were summed for split {statistics.split}")
        if not all(bool(tensor.isfinite().all()) for tensor in statistics._tensors().values()):
            raise CalibrationError(f"sums of split {statistics.split} are not finite")
        self.statistics = statistics
        self._mean_x = statistics.sum_x / statistics.count
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
        offset = self.statistics.sum_y[layer] / self.statistics.count - matrix @ self._mean_x
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
