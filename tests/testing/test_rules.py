"""`check_rule`: right rules pass, wrong ones fail with a small counterexample that runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ridgefill_compile.passes.arithmetic_rules import along, reduction
from ridgefill_compile.passes.calls import Call, first_operand
from ridgefill_compile.passes.rules import RULES
from ridgefill_compile.testing import Mismatch, check_rule, sample
from ridgefill_compile.testing.rules import entries, samples_of
from tests.testing.planted import cumsum_is_pointwise

aten = torch.ops.aten
FROM_SCHEMAS = [
    aten.cumsum.default,
    aten.softmax.int,
    aten.mul.Tensor,
    aten.where.self,
    aten.linear.default,
    aten.matmul.default,
    aten.cat.default,
    aten.gather.default,
    aten.embedding.default,
    aten.layer_norm.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.topk.default,
    aten.view_as_real.default,
    aten.scaled_dot_product_attention.default,
]


@pytest.mark.parametrize("op", FROM_SCHEMAS, ids=str)
def test_rules_of_the_table_on_samples_of_their_schema(op: Any) -> None:
    found = check_rule(op)
    assert {finding.verdict for finding in found} <= {"right", "none"}
    assert any(finding.verdict == "right" for finding in found)


@pytest.mark.parametrize("op", [op for op in FROM_SCHEMAS if op not in (aten.mul.Tensor, aten.where.self)], ids=str)
def test_taking_an_op_for_one_that_works_on_its_first_operand_row_by_row_is_noticed(op: Any) -> None:
    if RULES[op] is first_operand or op is aten.view_as_real.default:
        return
    with pytest.raises(Mismatch) as caught:
        check_rule(op, first_operand)
    fails_again(caught.value)


def fails_again(mismatch: Mismatch) -> None:
    """The printed code fails with the same message."""
    with pytest.raises(Mismatch) as again:
        exec(mismatch.source, {})
    assert str(again.value).splitlines()[1:5] == str(mismatch).splitlines()[1:5]


def test_a_wrong_rule_and_its_smallest_counterexample() -> None:
    with pytest.raises(Mismatch) as caught:
        check_rule(aten.cumsum.default, cumsum_is_pointwise)
    text = str(caught.value)
    assert "aten.cumsum.default(float32[3], 0) -> [3]" in text
    assert "wanted: last 1 of dim 0" in text
    assert "the rule says: aten.cumsum.default(<last 1 of dim 0 of input_0>, 0)" in text
    assert "from tests.testing.planted import cumsum_is_pointwise as rule" in caught.value.source
    fails_again(caught.value)


def test_the_smallest_of_given_samples_is_shown() -> None:
    samples: list[Any] = [
        (torch.randn(4, 6), 1),
        (torch.randn(2, 2), 0),
        sample(aten.cumsum.default, torch.randn(3, 3), -1),
    ]
    with pytest.raises(Mismatch, match=r"cumsum.default\(float32\[2, 2\], 0\)"):
        check_rule(aten.cumsum.default, cumsum_is_pointwise, samples)


def test_a_rule_in_the_table_can_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, aten.cumsum.default, cumsum_is_pointwise)
    with pytest.raises(Mismatch) as caught:
        check_rule(aten.cumsum.default)
    fails_again(caught.value)


def test_candidates_for_ops_without_a_rule() -> None:
    assert aten.logcumsumexp.default not in RULES
    assert check_rule(aten.logcumsumexp.default, along())
    with pytest.raises(Mismatch):
        check_rule(aten.logcumsumexp.default, reduction)


def test_errors_and_guards_of_a_rule_are_findings() -> None:
    def broken(node: Any, rows: Any) -> Call:
        raise KeyError("nothing here")

    with pytest.raises(Mismatch, match="an error: 'nothing here'"):
        check_rule(aten.cumsum.default, broken)


def test_what_cannot_be_checked_is_no_pass() -> None:
    with pytest.raises(ValueError, match="could be made of its schema"):
        check_rule(aten.einsum.default)
    with pytest.raises(ValueError, match="narrows nothing of"):
        check_rule(aten.cumsum.default, lambda node, rows: None)
    check_rule(aten.einsum.default, samples=[("bij,bjk->bik", [torch.randn(2, 3, 3), torch.randn(2, 3, 4)])])


def test_samples_of_a_schema_are_small_and_many() -> None:
    samples = samples_of(aten.matmul.default)
    assert 10 < len(samples) <= 60
    assert [entries(s) for s in samples] == sorted(entries(s) for s in samples)
