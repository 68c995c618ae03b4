"""What every recurrence is held to, against a slow loop over rows in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.flop_counter import FlopCounterMode

from ridgefill_compile.passes.rows import same
from ridgefill_compile.recurrences import RECURRENCES, Recurrence, tiles

Arguments = dict[str, Any]

LENGTHS = (1, 2, 7, 8, 9, 31, 63, 64, 65, 100, 127, 128, 129, 130)


@dataclass(frozen=True)
class Case:
    """One operator and its definition.

    Attributes:
        operator: name in `torch.ops.ridgefill`.
        draw: arguments for (batch, rows, with initial state, dtype).
        loop: (outputs of all rows, final state) of arguments in float64, row by row. A state may have several parts.
    """

    operator: str
    draw: Callable[[int, int, bool, torch.dtype], Arguments]
    loop: Callable[[Arguments], tuple[Tensor, ...]]

    @property
    def recurrence(self) -> Recurrence:
        return RECURRENCES[getattr(torch.ops.ridgefill, self.operator).default]

    @property
    def function(self) -> Callable[..., tuple[Tensor, ...]]:
        """What the operator runs, open to those who count operations."""
        return OPDEFS[f"ridgefill::{self.operator}"]._init_fn

    def run(self, arguments: Arguments) -> tuple[Tensor, ...]:
        return self.recurrence.op(**arguments)

    def narrowed(self, arguments: Arguments, wanted: int) -> Arguments:
        """The same call for the last rows' outputs alone."""
        changes: Arguments = {}
        for name in self.recurrence.query_side:
            operand, dim = arguments[name], self.recurrence.row_dim
            changes[name] = operand.narrow(dim, operand.shape[dim] - wanted, wanted)
        if self.recurrence.outputs is not None:
            changes[self.recurrence.outputs] = wanted
        return arguments | changes


def close(actual: Tensor, expected: Tensor, allowed: float = 1e-5) -> None:
    """Equal to `allowed` times the largest entry."""
    assert actual.shape == expected.shape
    if expected.numel():
        off = (actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-30)
        assert off <= allowed, f"off by {off:.1e} of the largest entry"


def doubled(arguments: Arguments) -> Arguments:
    return {k: v.double() if isinstance(v, Tensor) else v for k, v in arguments.items()}


def check_lengths(case: Case, with_state: bool) -> None:
    for rows in LENGTHS:
        arguments = case.draw(2, rows, with_state, torch.float32)
        for actual, expected in zip(case.run(arguments), case.loop(doubled(arguments)), strict=True):
            close(actual, expected)


def check_narrowed(case: Case) -> None:
    """Fewer rows of outputs are the last ones, and the state does not change with them."""
    for rows in (50, 64, 200):
        arguments = case.draw(2, rows, True, torch.float32)
        outputs, *states = case.loop(doubled(arguments))
        dim = case.recurrence.row_dim
        for wanted in sorted({0, 1, 5, 49, 50, 64, 65, 127, 128, 136, 199, 200}):
            if wanted <= rows:
                some, *same_states = case.run(case.narrowed(arguments, wanted))
                close(some, outputs.narrow(dim, rows - wanted, wanted))
                for same_state, state in zip(same_states, states, strict=True):
                    close(same_state, state)


def check_half_precision(case: Case, allowed: float = 1e-2) -> None:
    """Low-precision operands, outputs in the type of the model's own function, state in fp32."""
    arguments = case.draw(2, 100, True, torch.bfloat16)
    (outputs, *states), (expected, *final) = case.run(arguments), case.loop(doubled(arguments))
    close(outputs, expected, allowed)
    for state, its in zip(states, final, strict=True):
        assert state.dtype == torch.float32
        close(state, its, 1e-5)


def check_autocast(case: Case) -> None:
    """What is computed in fp32 is so under autocast, too."""
    arguments = case.draw(2, 100, True, torch.float32)
    expected = case.run(arguments)
    with torch.autocast("cpu", torch.bfloat16):
        actual = case.run(arguments)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def check_operands_untouched(case: Case) -> None:
    """Nothing is written into operands, also not where they come as views, and no result is one of them."""
    for batch, rows in ((1, 64), (1, 1), (2, 130)):
        arguments = case.draw(batch, rows, True, torch.float32)
        before = {k: v.clone() for k, v in arguments.items() if isinstance(v, Tensor)}
        results = case.run(arguments)
        memory = {v.untyped_storage().data_ptr() for v in arguments.values() if isinstance(v, Tensor)}
        assert all(torch.equal(before[k], arguments[k]) for k in before)
        own = [result.untyped_storage().data_ptr() for result in results]
        assert not memory & set(own)
        assert len(set(own)) == len(own)
        strided = {
            k: v.transpose(-1, -2).contiguous().transpose(-1, -2) if isinstance(v, Tensor) and v.dim() > 1 else v
            for k, v in arguments.items()
        }
        for actual, expected in zip(case.run(strided), results, strict=True):
            close(actual, expected, 1e-6)


def check_operator(case: Case) -> None:
    """Schema and fake implementation, for full and narrowed calls, by torch's own checker."""
    for with_state, wanted in ((False, 70), (True, 9)):
        arguments = case.narrowed(case.draw(2, 70, with_state, torch.float32), wanted)
        for tests in ("test_schema", "test_faketensor"):
            torch.library.opcheck(case.recurrence.op, (), arguments, test_utils=tests)


def check_symbolic_sizes(case: Case) -> None:
    """One trace serves every length and every number of outputs: no guard ties sizes down."""
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    wanted, dim = 9, case.recurrence.row_dim
    real = case.narrowed(case.draw(2, 70, True, torch.float32), wanted)
    arguments = {k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in real.items()}
    if case.recurrence.outputs is not None:
        arguments[case.recurrence.outputs] = shapes.create_unbacked_symint()
    with mode:
        results = case.run(arguments)
    outputs = results[0]
    if case.recurrence.query_side:
        assert outputs.shape[dim] is not wanted
        (query,) = (arguments[name] for name in case.recurrence.query_side)
        assert same(outputs.shape[dim], query.shape[dim])
    assert [guard.expr for guard in shapes.guards] == []
    for fake, result in zip(results, case.run(real), strict=True):
        assert fake.dtype == result.dtype
        assert fake.dim() == result.dim()


def check_multiply_adds(case: Case, counted: float = 0.03) -> None:
    """The formula is what matrix products really computed, to a share of `counted` (what else there is)."""
    for rows, wanted in ((256, 256), (256, 64), (256, 0)):
        arguments = case.narrowed(case.draw(2, rows, False, torch.float32), wanted)
        with FlopCounterMode(display=False) as counter:
            case.function(**arguments)
        expected = counter.get_total_flops() / 2
        formula = float(case.recurrence.multiply_adds(traced(case, arguments)))
        assert abs(formula - expected) <= counted * expected


def traced(case: Case, arguments: Arguments) -> Node:
    """The operator's node in a graph of its own."""
    graph = Graph()
    named: dict[str, Any] = {}
    for name, value in arguments.items():
        named[name] = value
        if isinstance(value, Tensor):
            named[name] = graph.placeholder(name)
            named[name].meta["val"] = value
    node = graph.call_function(case.recurrence.op, (), named)
    node.meta["val"] = case.run(arguments)
    return node


class OperatorTests:
    """The tests of every operator. The module of a subclass gives the fixture `case`."""

    @pytest.mark.parametrize("with_state", [False, True])
    def test_every_length_equals_the_loop_over_rows(self, case, with_state):
        check_lengths(case, with_state)

    def test_fewer_outputs_are_the_last(self, case):
        check_narrowed(case)

    def test_low_precision(self, case):
        check_half_precision(case)

    def test_autocast_changes_nothing(self, case):
        check_autocast(case)

    def test_operands_are_left_alone(self, case):
        check_operands_untouched(case)

    def test_operator_is_sound(self, case):
        check_operator(case)
        check_symbolic_sizes(case)


class TiledTests(OperatorTests):
    """And of those that go by tiles, in matrix products."""

    def test_long_prompts_go_in_stretches(self, case, monkeypatch):
        """A stretch of one tile, and of two, so that state and place of outputs go from one to the next."""
        for budget in (1, 2 * 2 * 4 * 64 * 12):
            monkeypatch.setitem(tiles._BUDGET, "cpu", budget)
            check_narrowed(case)
            arguments = case.draw(2, 400, True, torch.float32)
            for actual, expected in zip(case.run(arguments), case.loop(doubled(arguments)), strict=True):
                close(actual, expected)

    def test_multiply_adds_are_what_is_computed(self, case):
        check_multiply_adds(case)


class ElementwiseTests(OperatorTests):
    """And of those that go row by row, whose cost torch does not count."""

    def test_multiply_adds_without_outputs_are_fewer(self, case):
        counts = [
            case.recurrence.multiply_adds(traced(case, case.narrowed(case.draw(2, 64, False, torch.float32), wanted)))
            for wanted in (0, 32, 64)
        ]
        assert 0 < counts[0] < counts[1] < counts[2]
        assert counts[2] - counts[1] == counts[1] - counts[0]
