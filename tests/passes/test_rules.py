"""Every row rule against ground truth, on sizes chosen to collide; and that this notices rules that are broken.

A wrong rule makes results wrong: it fails here with op, shapes and rows. A missing one only costs speed: it is held
against `KNOWN_GAPS`, so that a new gap is a decision.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.fx import Graph

from ridgefill_compile.passes.rows import Rows, same
from ridgefill_compile.passes.rules import RULES, rule_for
from ridgefill_compile.testing.square import Finding, judge
from tests.passes.graphs import aten, fake, fake_mode
from tests.passes.samples import by_op, pointwise, real, spread, whole

Role = tuple[int, str]  # dimension, counted from the end, and "blocks" where the rows are in several

_WEIGHT = "columns of a weight or table: these are read whole"
_AHEAD = "the last rows of a piece are blocks of what was cut, or its last rows where the piece is the last one"
_JOINT = "rows that span operands, or whose last operand is empty or of a narrower type; no blocks along the joint"
_FRONT = "rows that are added in front leave the last ones as they are"
_APART = "blocks that are cut, or whose number does not provably divide a symbolic size"

_WRITTEN = "rows that are written into, or behind what is written"
_SCAN = "samples, heads, channels and entries of a scan; rows in blocks"
_EVERY = {(dim, blocks) for dim in (-3, -2, -1) for blocks in ("", "blocks")}

# Narrowings that would be right and that no rule says: op -> why, and on which dimensions of the result.
KNOWN_GAPS: dict[Any, tuple[str, set[Role]]] = {
    aten.linear.default: (_WEIGHT, {(-1, ""), (-1, "blocks")}),
    aten.embedding.default: (_WEIGHT, {(-1, ""), (-1, "blocks")}),
    aten.glu.default: ("the two halves are blocks", {(-3, ""), (-2, ""), (-1, "")}),
    aten.matmul.default: ("operands that are vectors", {(-2, ""), (-1, ""), (-1, "blocks")}),
    aten.einsum.default: (
        "equations without an explicit result, or with an ellipsis",
        {(-3, ""), (-2, ""), (-2, "blocks"), (-1, ""), (-1, "blocks")},
    ),
    aten.scaled_dot_product_attention.default: (
        "heads and entries of values; query rows in blocks; samples of three dimensions",
        {(-3, ""), (-3, "blocks"), (-2, "blocks"), (-1, ""), (-1, "blocks")},
    ),
    aten.view.default: (_APART, {(-3, "blocks"), (-2, "blocks"), (-1, "blocks")}),
    aten.reshape.default: (_APART, {(-3, "blocks"), (-2, "blocks"), (-1, "blocks")}),
    aten.flatten.using_ints: (_APART, {(-2, "blocks")}),
    aten.unflatten.int: (_APART, {(-3, "blocks")}),
    aten.squeeze.dim: (
        "the dimension to squeeze, where it is longer than 1 and stays",
        {(-4, ""), (-3, ""), (-3, "blocks"), (-2, ""), (-2, "blocks"), (-1, ""), (-1, "blocks")},
    ),
    aten.slice.Tensor: (
        "rows that end before the operand does; blocks along the cut",
        {(-3, ""), (-3, "blocks"), (-2, ""), (-2, "blocks"), (-1, ""), (-1, "blocks")},
    ),
    aten.cat.default: (_JOINT, {(-3, "blocks"), (-2, ""), (-2, "blocks"), (-1, "blocks")}),
    aten.concat.default: (_JOINT, {(-3, "blocks"), (-2, "blocks"), (-1, "blocks")}),
    aten.concatenate.default: (_JOINT, {(-3, "blocks"), (-2, "blocks"), (-1, "blocks")}),
    aten.slice_scatter.default: (_WRITTEN, _EVERY),
    aten.select_scatter.default: (_WRITTEN, _EVERY),
    aten.scatter.src: (_WRITTEN, _EVERY),
    aten.scatter.value: (_WRITTEN, _EVERY),
    aten.unsafe_chunk.default: (_AHEAD, {(-3, ""), (-2, ""), (-1, "")}),
    aten.unsafe_split.Tensor: (_AHEAD, {(-3, ""), (-2, ""), (-1, "")}),
    aten.split.Tensor: (_AHEAD, {(-3, ""), (-2, ""), (-1, "")}),
    aten.split_with_sizes.default: (_AHEAD, {(-3, ""), (-2, ""), (-1, "")}),
    aten.chunk.default: (_AHEAD, {(-3, ""), (-2, ""), (-1, "")}),
    aten.repeat.default: (
        "what is repeated along its rows ends with its last ones",
        {(-3, ""), (-2, ""), (-1, "")},
    ),
    aten.constant_pad_nd.default: (_FRONT, {(-2, "")}),
    aten.conv1d.default: ("channels; rows in blocks", {(-2, ""), (-2, "blocks"), (-1, "blocks")}),
    aten.pad.default: (_FRONT, {(-2, ""), (-1, "")}),
    aten.index.Tensor: (
        "indices with a `:` between them",
        {(dim, blocks) for dim in (-4, -3, -2, -1) for blocks in ("", "blocks")},
    ),
    torch.ops.ridgefill.gated_delta_rule.default: (_SCAN, _EVERY | {(-4, "")}),
    torch.ops.ridgefill.linear_attention.default: (_SCAN, _EVERY | {(-4, "")}),
    torch.ops.ridgefill.linear_recurrence.default: (_SCAN, _EVERY - {(-3, "blocks"), (-2, "blocks")}),
    torch.ops.ridgefill.mlstm.default: (_SCAN, _EVERY | {(-4, "")}),
    torch.ops.ridgefill.selective_scan.default: (_SCAN, _EVERY - {(-3, "blocks")}),
    torch.ops.ridgefill.wkv.default: (_SCAN, _EVERY - {(-3, "blocks"), (-2, "blocks")}),
    aten.gather.default: ("an index that is smaller than the operand", {(-3, ""), (-2, ""), (-1, "blocks")}),
}


@functools.cache
def findings(op: Any) -> tuple[Finding, ...]:
    """Every verdict on every sample of an op."""
    return tuple(finding for given in by_op().get(op, []) for finding in judge(given))


def wrong(found: Sequence[Finding]) -> str:
    """What is wrong, one a line."""
    lines = [str(finding) for finding in found if finding.verdict == "wrong"]
    return "\n".join([f"{len(lines)} of {len(found)} wrong", *lines[:20]]) if lines else ""


def narrows(finding: Finding) -> bool:
    """Whether the rule computed some rows, and not all."""
    rows = finding.rows
    return finding.verdict == "right" and not same(rows.length * rows.blocks, finding.size[rows.dim])


def role(finding: Finding) -> Role:
    """The dimension of the result."""
    return finding.rows.dim - len(finding.size), "" if finding.rows.blocks == 1 else "blocks"


OPS = [op for op in RULES if op is not operator.getitem]


@pytest.mark.parametrize("op", OPS, ids=str)
def test_narrowed_call_gives_the_rows_of_the_whole(op: Any) -> None:
    assert not wrong(findings(op))


def test_every_rule_is_exercised() -> None:
    dead = [str(op) for op in OPS if not any(map(narrows, findings(op)))]
    assert not dead, "no sample on which these rules narrow anything"
    assert any(f.result is not None and narrows(f) for op in OPS for f in findings(op)), "operator.getitem"
    assert set(by_op()) == set(OPS)


def test_gaps_are_known() -> None:
    found = {op: {role(f) for f in findings(op) if f.verdict == "none" and f.detail} for op in OPS}
    example = {(op, role(f)): f for op in OPS for f in findings(op) if f.verdict == "none" and f.detail}
    for op, roles in found.items():
        known = KNOWN_GAPS.get(op, ("", set()))[1]
        new, closed = roles - known, known - roles
        assert not new, "\n".join(f"a rule could say more: {example[op, gap]}" for gap in new)
        assert not closed, f"{op}: {closed} are no gaps any more; take them from the table"
    assert set(KNOWN_GAPS) <= set(OPS)


# ---------------------------------------------------------------- pointwise, by tag


def tagged() -> list[Any]:
    """Every functional op that torch tags as pointwise."""
    packets = (getattr(aten, name) for name in dir(aten))
    ops = [getattr(p, name) for p in packets if isinstance(p, torch._ops.OpOverloadPacket) for name in p.overloads()]
    return [
        op
        for op in ops
        if torch.Tag.pointwise in op.tags
        and torch.Tag.nondeterministic_seeded not in op.tags
        and not op._schema.is_mutable
        and all(str(result.type) == "Tensor" for result in op._schema.returns)
        and op not in RULES
    ]


def test_every_pointwise_op_commutes() -> None:
    ops = tagged()
    assert len(ops) > 200
    silent = []
    for op in ops:
        found = [finding for given in pointwise(op) for finding in judge(given)]
        assert not wrong(found)
        assert not [str(f) for f in found if f.detail], "a gap"
        if not any(map(narrows, found)):
            silent.append(str(op))
    assert len(silent) <= 4, f"no sample for {silent}"  # those whose operands are all optional; see the next test


def test_pointwise_calls_that_schemas_do_not_show() -> None:
    for given in spread():
        found = list(judge(given))
        assert not wrong(found)
        assert any(map(narrows, found)), given
        assert not [str(f) for f in found if f.detail], "a gap"


def test_what_may_draw_random_numbers_has_no_rule() -> None:
    for op in (aten.dropout.default, aten.bernoulli.p, aten.rand_like.default, aten.native_dropout.default):
        graph = Graph()
        assert rule_for(graph.call_function(op, (graph.placeholder("x"), 0.5, True))) is None


# ---------------------------------------------------------------- what no sample can show


def test_masks_as_indices_have_no_rule() -> None:
    """Which entries they choose depends on all of them."""
    mode = fake_mode()
    for dtype in (torch.bool, torch.uint8):
        graph = Graph()
        x, mask = graph.placeholder("x"), graph.placeholder("mask")
        x.meta["val"], mask.meta["val"] = fake(mode, real(6, 4), "x"), fake(mode, whole(2, 6).to(dtype), "mask")
        chosen = graph.call_function(aten.index.Tensor, (x, [mask]))
        with mode:
            chosen.meta["val"] = x.meta["val"][:3]
        assert RULES[aten.index.Tensor](chosen, Rows(0, 1)) is None
        assert RULES[aten.index.Tensor](chosen, Rows(1, 1)) is None


def test_one_hot_of_unknown_width_has_no_rule() -> None:
    mode, graph = fake_mode(), Graph()
    x = graph.placeholder("x")
    x.meta["val"] = fake(mode, whole(4, 2, 6), "x")
    hot = graph.call_function(aten.one_hot.default, (x,))
    hot.meta["val"] = fake(mode, whole(2, 2, 6, 4), "hot")
    assert RULES[aten.one_hot.default](hot, Rows(1, 2)) is None
