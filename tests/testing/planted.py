"""Bugs, planted for tests of what finds them."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from ridgefill_compile.passes.calls import Call, Need, arguments, aten, rewrite, shape
from ridgefill_compile.passes.rows import Rows


def last_row_of_scores(module: GraphModule) -> None:
    """Softmax over queries instead of keys, in the last layer alone."""
    softmax = [node for node in module.graph.nodes if node.target is aten.softmax.int][-1]
    softmax.args = (softmax.args[0], -2, *softmax.args[2:])


def gelu_of_tail(module: GraphModule) -> None:
    """The first activation is made on the last row alone, and that one repeated: right for the last row."""
    node = next(node for node in module.graph.nodes if node.target is aten.gelu.default)
    with module.graph.inserting_after(node):
        last = module.graph.call_function(aten.slice.Tensor, (node, 1, -1))
    with module.graph.inserting_after(last):
        wide = module.graph.call_function(aten.expand.default, (last, list(shape(node))))
    node.replace_all_uses_with(wide, delete_user_cb=lambda user: user is not last)


def without_change(module: GraphModule) -> GraphModule:
    """Nothing planted."""
    return module


def cumsum_is_pointwise(node: Node, rows: Rows) -> Call:
    """As if each entry were its own sum."""
    return rewrite(node, self=Need(arguments(node)["self"], rows))
