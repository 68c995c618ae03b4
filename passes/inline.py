"""A function of tensors, written into a graph as the ops it consists of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from ridgefill_compile.errors import CannotFill
from ridgefill_compile.passes.emit import Emitter


def inline(emit: Emitter, function: Callable[..., Any], operands: Sequence[Node]) -> list[Node]:
    """Add `function(*operands)` at the insert point: the nodes that hold the tensors it returns.

    It is traced on the operands' fake values, so lengths may be symbolic; what it returns may not depend on what the
    values are.

    Raises:
        CannotFill: it reads a value on the host, or makes a tensor from data.
    """
    values = [operand.meta["val"] for operand in operands]
    with emit.mode, torch.no_grad():
        traced = make_fx(function, pre_dispatch=True)(*values)
    traced.graph.eliminate_dead_code()
    copies: dict[Node, Node] = {}
    given = iter(operands)
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            copies[node] = next(given)
        elif node.op == "get_attr":
            raise CannotFill("a function to write into the graph makes a tensor from data", node)
        elif node.op == "output":
            return [copies[leaf] for leaf in tree_leaves(node.args[0]) if isinstance(leaf, Node)]
        else:
            copies[node] = emit.graph.node_copy(node, copies.__getitem__)
    raise AssertionError("a graph ends with its output")
