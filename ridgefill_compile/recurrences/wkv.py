"""RWKV-4's weighted key-value average, as one operator.

Per channel, with decay w = -e^time_decay a row, and bonus u for the current row:

    a_t = e^w a_{t-1} + e^(k_t) v_t      b_t = e^w b_{t-1} + e^(k_t)
    y_t = (a_{t-1} + e^(u + k_t) v_t) / (b_{t-1} + e^(u + k_t))

Exponents are unbounded, so both sums are kept over e^m, m the running maximum of the exponents in them. A decay that is
the same for every row makes stretches of rows alike: they are run side by side from nothing, then, in turn, each gets
what entered it, decayed by its length.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from ridgefill_compile.recurrences.tiles import without_autocast

_NOTHING = -1e38  # exponent of an empty sum


class _Sums(NamedTuple):
    """The state: e^most times `numerator` and `denominator`, each [..., B, D]."""

    numerator: Tensor
    denominator: Tensor
    most: Tensor

    def plus(self, value: Tensor, exponent: Tensor) -> _Sums:
        """With `e^exponent value` added to the numerator and `e^exponent` to the denominator."""
        most = torch.maximum(self.most, exponent)
        kept, new = (self.most - most).exp_(), (exponent - most).exp_()
        return _Sums((new * value).addcmul_(kept, self.numerator), new.addcmul(kept, self.denominator), most)

    def decayed(self, exponent: Tensor) -> _Sums:
        """Times e^exponent."""
        return self._replace(most=self.most + exponent)


@torch.library.custom_op("ridgefill::wkv", mutates_args=())
@without_autocast
def wkv(
    time_decay: Tensor, time_first: Tensor, key: Tensor, value: Tensor, initial_state: Tensor | None, outputs: int
) -> tuple[Tensor, Tensor]:
    """Outputs of the last rows, and the state after all rows.

    Args:
        time_decay: [D], logarithm of the decay's rate.
        time_first: [D], bonus u.
        key: [B, N, D]
        value: [B, N, D]
        initial_state: [3, B, D]: both sums over e^m, and m. None is empty.
        outputs: how many last rows to put out; -1: all.

    Returns:
        Outputs [B, outputs, D] in the key's dtype, final state [3, B, D] in fp32 (which is what is computed in).
    """
    rate, bonus = (-time_decay.exp()).to(torch.float32), time_first.to(torch.float32)
    keys, values = (x.to(torch.float32).transpose(0, 1) for x in (key, value))
    wanted = key.shape[1] if outputs < 0 else outputs
    silent = key.shape[1] - wanted
    results = key.new_empty(key.shape[0], wanted, key.shape[2])
    state = _empty(keys[0]) if initial_state is None else _Sums(*initial_state.to(torch.float32))
    state, _ = _through(keys[:silent], values[:silent], rate, state)
    final, stretches = _through(keys[silent:], values[silent:], rate, state)
    first = 0
    for stretch, before in stretches:  # again, now from what really entered each
        lanes, rows = stretch.shape[:2]
        part = slice(silent + first, silent + first + lanes * rows)
        apart = results[:, first : first + lanes * rows].unflatten(1, (lanes, rows))
        _run(stretch, values[part].unflatten(0, (lanes, rows)), rate, before, bonus, apart)
        first += lanes * rows
    return results, torch.stack(final)


@wkv.register_fake
def _(
    time_decay: Tensor, time_first: Tensor, key: Tensor, value: Tensor, initial_state: Tensor | None, outputs: int
) -> tuple[Tensor, Tensor]:
    batch, rows, channels = key.shape
    wanted = rows if guard_or_false(outputs < 0) else outputs  # a symbolic number of rows is no -1
    return key.new_empty(batch, wanted, channels), key.new_empty(3, batch, channels, dtype=torch.float32)


def _empty(like: Tensor) -> _Sums:
    zero = torch.zeros_like(like)
    return _Sums(zero, zero, torch.full_like(like, _NOTHING))


def _through(keys: Tensor, values: Tensor, rate: Tensor, state: _Sums) -> tuple[_Sums, list[tuple[Tensor, _Sums]]]:
    """State after rows [N, B, D], and keys [lanes, rows, B, D] of their stretches with the state before each.

    About as many stretches as rows in each; what is left over is one more.
    """
    stretches = []
    lanes = math.isqrt(len(keys))
    cut = len(keys) // lanes * lanes if lanes else 0
    for part, count in ((slice(0, cut), lanes), (slice(cut, None), 1)):
        if len(keys[part]) == 0:
            continue
        stretch, its_values = (x[part].unflatten(0, (count, -1)) for x in (keys, values))
        ends = _run(stretch, its_values, rate, _empty(stretch[:, 0]), None, None)
        entering = []
        for lane in range(count):
            entering.append(state)
            end = _Sums(*(entry[lane] for entry in ends))
            state = _joined(end, state.decayed(rate * stretch.shape[1]))
        stretches.append((stretch, _Sums(*map(torch.stack, zip(*entering, strict=True)))))
    return state, stretches


def _joined(left: _Sums, right: _Sums) -> _Sums:
    most = torch.maximum(left.most, right.most)
    a, b = (left.most - most).exp_(), (right.most - most).exp_()
    return _Sums(a * left.numerator + b * right.numerator, a * left.denominator + b * right.denominator, most)


def _run(
    keys: Tensor, values: Tensor, rate: Tensor, state: _Sums, bonus: Tensor | None, outputs: Tensor | None
) -> _Sums:
    """Row by row, all lanes at once: keys and values [lanes, rows, B, D], outputs [B, lanes, rows, D] to write."""
    for t in range(keys.shape[1]):
        key, value = keys[:, t], values[:, t]
        if bonus is not None and outputs is not None:
            here = state.plus(value, key + bonus)
            outputs[:, :, t] = (here.numerator / here.denominator).transpose(0, 1)
        state = state.decayed(rate).plus(value, key)
    return state
