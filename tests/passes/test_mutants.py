"""Rules broken on purpose: the commuting square must notice each of them, or it proves nothing."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch.fx import Node

from ridgefill_compile.passes import arithmetic_rules, calls, layout_rules, rules
from ridgefill_compile.passes.calls import Call, Need, Rule, arguments, first_operand, rewrite, shape
from ridgefill_compile.passes.rows import IntLike, Rows, same
from ridgefill_compile.passes.rules import RULES
from ridgefill_compile.recurrences import RECURRENCES
from ridgefill_compile.testing.square import judge
from tests.passes.graphs import aten
from tests.passes.samples import by_op, spread

OPS = [op for op in RULES if op is not operator.getitem]


def noticed(*ops: Any, selected: bool = False) -> bool:
    """Whether the sweep of these ops finds something wrong with last rows, or with selected ones."""
    found = (f for op in ops for given in by_op()[op] for f in judge(given, gaps=False))
    return any(f.verdict == "wrong" and (f.rows.selected is not None) == selected for f in found)


# ---------------------------------------------------------------- any rule, broken the same way


def other_dim(rule: Rule) -> Rule:
    """Rows of the next dimension."""

    def mutant(node: Node, rows: Rows) -> Call | None:
        value = node.meta["val"]
        rank = (value[0] if isinstance(value, list | tuple) else value).dim()
        return rule(node, rows.at((rows.dim + 1) % rank))

    return mutant


def one_less(rule: Rule) -> Rule:
    """A row too few."""
    return lambda node, rows: rule(node, replace(rows, last=max(1, rows.last - 1)))


def one_block(rule: Rule) -> Rule:
    """As many rows, all from the end of the last sample."""
    return lambda node, rows: rule(node, replace(rows, last=rows.last * rows.blocks, blocks=1))  # type: ignore[arg-type]


def nothing_narrowed(rule: Rule) -> Rule:
    """Operands whole."""

    def whole(argument: Any) -> Any:
        if isinstance(argument, Need):
            return argument.node
        if isinstance(argument, list | tuple):
            return [whole(item) for item in argument]
        return argument

    def mutant(node: Node, rows: Rows) -> Call | None:
        call = rule(node, rows)
        if call is None:
            return None
        kwargs = {name: whole(value) for name, value in call.kwargs.items()}
        return Call(call.target, tuple(map(whole, call.args)), kwargs)

    return mutant


CONSTANT = {op for op in OPS if any(word in str(op) for word in ("ones", "zeros", "full", "empty"))}
NO_OPERANDS = {op for op in CONSTANT if "like" not in str(op)}
NO_OPERANDS |= {op for op, recurrence in RECURRENCES.items() if not recurrence.query_side}
REFUSES_BLOCKS = {aten.scaled_dot_product_attention.default}


@pytest.mark.parametrize("mutate", [other_dim, one_less, one_block, nothing_narrowed])
def test_every_rule_broken_is_noticed(mutate: Callable[[Rule], Rule], monkeypatch: pytest.MonkeyPatch) -> None:
    without_effect: dict[Any, set[Any]] = {one_block: CONSTANT | REFUSES_BLOCKS, nothing_narrowed: NO_OPERANDS}
    equivalent = without_effect.get(mutate, set())
    missed = []
    for op in OPS:
        with monkeypatch.context() as patch:
            patch.setitem(RULES, op, mutate(RULES[op]))
            if op not in equivalent and not noticed(op):
                missed.append(str(op))
    assert not missed


@pytest.mark.parametrize("mutate", [other_dim, one_less, one_block, nothing_narrowed])
def test_shared_results_and_the_tag_broken_are_noticed(
    mutate: Callable[[Rule], Rule], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(RULES, operator.getitem, mutate(RULES[operator.getitem]))
        assert noticed(aten.topk.default)
    monkeypatch.setattr(rules, "pointwise", mutate(arithmetic_rules.pointwise))
    found = (f for given in spread() for f in judge(given, gaps=False))
    assert any(f.verdict == "wrong" and f.rows.selected is None for f in found)


# ---------------------------------------------------------------- rules that somebody might write

PASSES_EVERY_DIM = [
    aten.softmax.int,
    aten.log_softmax.int,
    aten.cumsum.default,
    aten.sort.default,
    aten.topk.default,
    aten.glu.default,
    aten.flip.default,
    aten.layer_norm.default,
    aten.rms_norm.default,
    aten.native_layer_norm.default,
    aten.linear.default,
    aten.mean.dim,
    aten.transpose.int,
    aten.permute.default,
    aten.t.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.select.int,
    aten.unbind.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.repeat.default,
    aten.constant_pad_nd.default,
    aten.one_hot.default,
    aten.reshape.default,
    aten.expand.default,
    aten.embedding.default,
    aten.gather.default,
]


@pytest.mark.parametrize("op", PASSES_EVERY_DIM, ids=str)
def test_declaring_every_dimension_passing_is_noticed(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, op, first_operand)
    assert noticed(op)


def joined_rows_of_each(node: Node, rows: Rows) -> Call:
    """The last rows of each part, along the joint."""
    return rewrite(node, tensors=[Need(t, rows) for t in arguments(node)["tensors"]])


def first_joined(node: Node, rows: Rows) -> Call:
    """The first part's rows."""
    return Call(None, (Need(arguments(node)["tensors"][0], rows),))


def attention_at_the_top(node: Node, rows: Rows) -> Call | None:
    """`is_causal` kept: the first tail row would see one key."""
    query = arguments(node)["query"]
    return rewrite(node, query=Need(query, rows)) if rows.dim == len(shape(node)) - 2 else None


def attention_of_own_keys(node: Node, rows: Rows) -> Call | None:
    """Keys and values narrowed, too."""
    call = arithmetic_rules.attention(node, rows)
    if call is None:
        return None
    states = [Need(a, rows) for a in node.args[:3] if isinstance(a, Node)]
    return Call(call.target, (*states, *call.args[3:]), call.kwargs)


def read_from_the_rows(node: Node, rows: Rows) -> Call:
    """What is looked up is narrowed, too."""
    given = arguments(node)
    return rewrite(node, self=Need(given["self"], rows), index=Need(given["index"], rows))


def first_letter_only(node: Node, rows: Rows) -> Call | None:
    """The first operand of an einsum alone."""
    call = arithmetic_rules.einsum(node, rows)
    if call is None:
        return None
    first, *others = call.args[1]
    return Call(call.target, (call.args[0], [first, *(o.node if isinstance(o, Need) else o for o in others)]))


@pytest.mark.parametrize(
    ("op", "mutant"),
    [
        (aten.cat.default, joined_rows_of_each),
        (aten.cat.default, first_joined),
        (aten.stack.default, joined_rows_of_each),
        (aten.scaled_dot_product_attention.default, attention_at_the_top),
        (aten.scaled_dot_product_attention.default, attention_of_own_keys),
        (aten.gather.default, read_from_the_rows),
        (aten.einsum.default, first_letter_only),
    ],
)
def test_likely_mistakes_are_noticed(op: Any, mutant: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, op, mutant)
    assert noticed(op)


# ---------------------------------------------------------------- the arithmetic they share


def rows_by_size(rows: Rows, result: tuple[IntLike, ...], source: tuple[IntLike, ...]) -> Rows | None:
    """The dimension that has as many entries."""
    return next((Rows(dim, rows.last) for dim, size in enumerate(source) if same(size, result[rows.dim])), None)


def blocks_dropped(rows: Rows, result: tuple[IntLike, ...], source: tuple[IntLike, ...]) -> Rows | None:
    """Memory order, without its groups."""
    found = same_rows_in(rows, result, source)
    return None if found is None else Rows(found.dim, found.last)


same_rows_in = layout_rules.same_rows_in


def broadcast_from_the_left(operand: Any, rows: Rows, result: tuple[IntLike, ...]) -> Any:
    """Dimensions lined up at the front."""
    if not isinstance(operand, Node) or rows.dim >= len(shape(operand)):
        return operand
    return Need(operand, rows) if same(shape(operand)[rows.dim], result[rows.dim]) else operand


def same_as_traced(left: IntLike, right: IntLike) -> bool:
    """Sizes compared in Python: right for this trace, and a guard on every other."""
    return bool(left == right)


RESHAPES = [aten.view.default, aten.reshape.default, aten.flatten.using_ints]


@pytest.mark.parametrize(
    ("name", "mutant", "ops"),
    [
        ("same_rows_in", rows_by_size, RESHAPES),
        ("same_rows_in", blocks_dropped, RESHAPES),
        ("broadcast", broadcast_from_the_left, [aten.addmm.default, aten.matmul.default, aten.index.Tensor]),
        ("reaches_the_end", lambda node: True, [aten.slice.Tensor]),
        ("at_least", lambda left, right: True, [aten.slice.Tensor, aten.cat.default]),
        ("positive", lambda dim, rank: dim, [aten.softmax.int, aten.mean.dim, aten.cat.default, aten.select.int]),
        ("same", same_as_traced, [aten.view.default, aten.reshape.default]),
    ],
)
def test_broken_arithmetic_is_noticed(name: str, mutant: Any, ops: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (calls, arithmetic_rules, layout_rules):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, mutant)
    assert [str(op) for op in ops if not noticed(op)] == []


# ---------------------------------------------------------------- selected rows

CONSIDERS = {  # ops whose rules say less of selected rows than of the last ones
    aten.slice.Tensor,
    aten.cat.default,
    aten.concat.default,
    aten.concatenate.default,
    aten.repeat.default,
    aten.constant_pad_nd.default,
    aten.pad.default,
    aten.conv1d.default,
    aten.slice_scatter.default,
    aten.select_scatter.default,
    *(op for op, known in RECURRENCES.items() if known.query_side),
}


def never_declines(rule: Rule) -> Rule:
    """What holds of the last rows, said of selected ones as well."""

    def selecting(argument: Any, rows: Rows) -> Any:
        if isinstance(argument, Need):
            return Need(argument.node, replace(argument.rows, selected=rows.selected))
        if isinstance(argument, Call):
            return Call(argument.target, selecting(argument.args, rows), selecting(argument.kwargs, rows))
        if isinstance(argument, dict):
            return {name: selecting(value, rows) for name, value in argument.items()}
        return type(argument)(selecting(a, rows) for a in argument) if type(argument) in (list, tuple) else argument

    def mutant(node: Node, rows: Rows) -> Call | None:
        call = rule(node, replace(rows, selected=None))
        return None if call is None else selecting(call, rows)

    return mutant


def selects_nothing(rule: Rule) -> Rule:
    """The last rows alone."""
    return lambda node, rows: rule(node, replace(rows, selected=None))


@pytest.mark.parametrize("op", sorted(CONSIDERS, key=str), ids=str)
def test_a_rule_that_forgets_to_decline_is_noticed(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, op, never_declines(RULES[op]))
    assert noticed(op, selected=True)


def test_every_rule_that_selects_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    missed = []
    for op in set(OPS) - (NO_OPERANDS - CONSTANT):
        with monkeypatch.context() as patch:
            patch.setitem(RULES, op, selects_nothing(RULES[op]))
            if not noticed(op, selected=True):
                missed.append(str(op))
    assert not missed


def sequences_first(rows: Rows, found: Rows, result: tuple[IntLike, ...], source: tuple[IntLike, ...]) -> Rows:
    """Sequences where they were."""
    return replace(found, selected=rows.selected)


@pytest.mark.parametrize(
    ("module", "name", "mutant", "ops"),
    [
        (layout_rules, "_selecting", sequences_first, RESHAPES),
        (rules, "_one_to_one", lambda other, node, batch: True, [aten.constant_pad_nd.default, aten.pad.default]),
        (rules, "_spreads", lambda node, batch: True, [aten.matmul.default, aten.addmm.default, aten.index.Tensor]),
        (rules, "OWN_SEQUENCES", tuple(RULES.values()), [aten.matmul.default, aten.transpose.int, aten.select.int]),
    ],
)
def test_broken_arithmetic_of_sequences_is_noticed(
    module: Any, name: str, mutant: Any, ops: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, mutant)
    assert [str(op) for op in ops if not noticed(op, selected=True)] == []
