"""The table of row rules: for each op, what the last rows of its result need of its operands.

A rule answers one question, which is arithmetic and nothing else: *if only these rows of the result are wanted, which
call computes them, and of which operands are only some rows needed?* It returns that call, with every operand that
can be narrowed wrapped in `Need`; plain operands are needed whole. So one entry owns both the analysis (what is
demanded of whom) and the rewrite (how to compute less), and each is held to the commuting square

    op(x)[rows]  ==  rule(op)(x[rows])

by `tests/passes/test_rules.py`, on sizes chosen to collide. A rule that cannot tell returns None, as does an op that is
not in the table: then the op runs on all rows, its operands are needed whole, and the reader takes its slice. That is
always right, and only slow.

Pointwise ops are recognised by `torch.Tag.pointwise`; everything else is one line of `RULES`.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch.fx import Node

from ridgefill_compile.passes.arithmetic_rules import (
    along,
    attention,
    convolution,
    einsum,
    factory,
    linear,
    matmul,
    normalisation,
    pointwise,
    recurrence,
    reduction,
)
from ridgefill_compile.passes.calls import Call, CausalTail, Need, Rule, aten, first_operand, needs, shape
from ridgefill_compile.passes.layout_rules import (
    ORDERS,
    cat,
    embedding,
    expand,
    gather,
    getitem,
    index,
    one_hot,
    pad,
    permutation,
    pieces,
    repeat,
    reshape,
    scatter,
    select,
    select_scatter,
    slice_,
    slice_scatter,
    squeeze,
    stack,
    unbind,
    unfold,
    unsqueeze,
    view_as_real,
)
from ridgefill_compile.passes.rows import Rows, same
from ridgefill_compile.recurrences.table import RECURRENCES


@runtime_checkable
class RowByRow(Protocol):
    """A call that brings its own rule: a region of several ops that was proved as one."""

    def rule(self, node: Node, rows: Rows) -> Call | None:
        """See `Rule`."""


def rule_for(node: Node) -> Rule | None:
    """The rule of this node's op, or None."""
    if node.op != "call_function":
        return None
    target: Any = node.target
    rule = RULES.get(target)
    if rule is not None:
        return rule
    if isinstance(target, RowByRow):
        return target.rule
    tags = getattr(target, "tags", ())
    if torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags:
        return pointwise
    return None


def narrowed_call(node: Node, rows: Rows, rule: Rule | None = None) -> Call | None:
    """The call that computes just these rows of a node, as its op's rule (or `rule`) says; None: it cannot tell.

    Where rows are selected for each sequence apart, the rule is asked a second time, for one sequence: so it says where
    an operand's sequences are.
    """
    rule = rule or rule_for(node)
    call = rule(node, rows) if rule is not None else None
    batch = rows.selected.batch if rows.selected is not None else None
    if rule is None or call is None or not isinstance(batch, int) or rule in OWN_SEQUENCES:
        return call
    sequences = rule(node, Rows(batch, 1))
    if sequences is None:
        return None
    try:
        found: Call = with_sequences(call, sequences, node, batch)
    except LookupError:
        return None
    return found


def with_sequences(argument: Any, other: Any, node: Node, batch: int) -> Any:
    """A narrowed call whose operands know their sequences: `other` is the same call, narrowed to one of them.

    Raises:
        LookupError: an operand has the rows and not the sequences, and it is not known how it is spread over them.
    """
    again = partial(with_sequences, node=node, batch=batch)
    if isinstance(argument, Call):
        if not any(needs(argument)):  # a constant, or a size
            return argument
        if not isinstance(other, Call) or other.target != argument.target:
            raise LookupError
        args = again(argument.args, other.args)
        kwargs = {name: again(value, other.kwargs[name]) for name, value in argument.kwargs.items()}
        return Call(argument.target, args, kwargs)
    if isinstance(argument, CausalTail):
        assert argument.rows.selected is not None
        selected = replace(argument.rows.selected, batch=0)
        return argument._replace(rows=replace(argument.rows, selected=selected))
    if not isinstance(argument, Need):
        return [*map(again, argument, other)] if isinstance(argument, list | tuple) else argument
    assert argument.rows.selected is not None
    if isinstance(other, Need):
        if not _one_to_one(other, node, batch):
            raise LookupError
        selected = replace(argument.rows.selected, batch=other.rows.dim)
    elif _spreads(node, batch):
        place = batch - (len(shape(node)) - len(shape(argument.node)))
        selected = replace(argument.rows.selected, batch=place, spread=True)
    else:
        raise LookupError
    return Need(argument.node, replace(argument.rows, selected=selected))


def _one_to_one(other: Need, node: Node, batch: int) -> bool:
    """Whether sequence i of the result is made of the operand's sequence i."""
    if not isinstance(other.node.meta["val"], torch.Tensor):
        return True  # one of several results
    value = node.meta["val"]
    result = (value[0] if isinstance(value, list | tuple) else value).shape
    alone = other.rows.last == 1 and same(other.rows.blocks, 1)
    return alone and same(shape(other.node)[other.rows.dim], result[batch])


def _spreads(node: Node, batch: int) -> bool:
    """Whether operands that lack this dimension of the result are spread over it."""
    rule = rule_for(node)
    return rule in SPREADING and (rule is not matmul or batch < len(shape(node)) - 2)


def _table() -> dict[Any, Rule]:
    groups: list[tuple[Rule, list[Any]]] = [
        (
            first_operand,
            [aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other, aten._to_copy.default,
             aten.type_as.default, aten.contiguous.default, aten.clone.default, aten.detach.default,
             aten.alias.default, aten.square.default, aten.zeros_like.default, aten.ones_like.default,
             aten.full_like.default, aten.empty_like.default, aten.nan_to_num.default, aten.bucketize.Tensor],
        ),
        (
            pointwise,  # elementwise in all but the tag
            [aten.multiply.Tensor, aten.divide.Tensor, aten.where.Scalar, aten.where.ScalarSelf, aten.where.ScalarOther,
             aten.masked_fill.Tensor, aten.__and__.Tensor, aten.__or__.Tensor, aten.polar.default,
             aten.expand_as.default, aten.log_sigmoid.default, aten.hardswish.default, aten.copy.default,
             aten.subtract.Tensor, aten.negative.default, aten.floor_divide.default],
        ),
        (factory("size"), [aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format,
                           aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
                           aten.new_empty.default]),
        (
            reduction,
            [aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.amin.default, aten.var.correction,
             aten.std.correction, aten.norm.ScalarOpt_dim, aten.linalg_vector_norm.default, aten.logsumexp.default,
             aten.prod.dim_int, aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim, aten.any.dim,
             aten.all.dim, aten.var.dim, aten.std.dim],
        ),
        (along(), [aten.softmax.int, aten._softmax.default, aten.log_softmax.int, aten._log_softmax.default,
                   aten.cumsum.default, aten.cumprod.default, aten.sort.default, aten.sort.stable,
                   aten.argsort.default, aten.topk.default, aten.glu.default]),
        (along("dims"), [aten.flip.default, aten.roll.default]),
        (normalisation, [aten.layer_norm.default, aten.rms_norm.default, aten.native_layer_norm.default]),
        (linear, [aten.linear.default]),
        (matmul, [aten.matmul.default, aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default]),
        (einsum, [aten.einsum.default]),
        (convolution, [aten.conv1d.default]),
        (attention, [aten.scaled_dot_product_attention.default]),
        (reshape, [aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints,
                   aten.unflatten.int, aten.squeeze.default, aten.squeeze.dims, aten.view_as.default,
                   aten.reshape_as.default]),
        (expand, [aten.expand.default, aten.broadcast_to.default]),
        *((permutation(order), [op for op, own in ORDERS.items() if own is order])
          for order in dict.fromkeys(ORDERS.values())),
        (unsqueeze, [aten.unsqueeze.default]),
        (squeeze, [aten.squeeze.dim]),
        (select, [aten.select.int]),
        (slice_, [aten.slice.Tensor]),
        (cat, [aten.cat.default, aten.concat.default, aten.concatenate.default]),
        (slice_scatter, [aten.slice_scatter.default]),
        (select_scatter, [aten.select_scatter.default]),
        (scatter, [aten.scatter.src, aten.scatter.value]),
        (unfold, [aten.unfold.default]),
        (stack, [aten.stack.default]),
        (pieces, [aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default,
                  aten.unsafe_chunk.default, aten.unsafe_split.Tensor]),
        (unbind, [aten.unbind.int]),
        (getitem, [operator.getitem]),
        (repeat, [aten.repeat.default]),
        (pad, [aten.constant_pad_nd.default, aten.pad.default]),
        (embedding, [aten.embedding.default]),
        (index, [aten.index.Tensor]),
        (gather, [aten.gather.default]),
        (one_hot, [aten.one_hot.default]),
        (view_as_real, [aten.view_as_real.default]),
        (first_operand, [aten.view_as_complex.default]),
        (recurrence, list(RECURRENCES)),
    ]  # fmt: skip
    return {op: rule for rule, ops in groups for op in ops}


RULES: dict[Any, Rule] = _table()

OWN_SEQUENCES = (reshape, recurrence)  # rules that find the sequences themselves
SPREADING = (pointwise, matmul, attention)  # rules of ops that spread operands as broadcasting does
