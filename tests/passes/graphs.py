"""Small graphs with fake values, as capture leaves them, for testing one pass at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ridgefill_compile.passes.functionalize import functionalize

aten = torch.ops.aten


def fake_mode() -> FakeTensorMode:
    """A fake mode that takes symbolic sizes."""
    return FakeTensorMode(shape_env=ShapeEnv())


def fake(mode: FakeTensorMode, value: torch.Tensor, name: str, dynamic: Collection[int] = ()) -> torch.Tensor:
    """The fake twin of a tensor, strides kept; the sizes of dimensions in `dynamic` are symbolic."""
    kinds = [DimDynamic.DYNAMIC if dim in dynamic else DimDynamic.STATIC for dim in range(value.dim())]
    context: StatelessSymbolicContext = StatelessSymbolicContext(dynamic_sizes=kinds)
    return mode.from_tensor(value, source=ConstantSource(name), symbolic_context=context)


def traced(
    function: Callable[..., Any],
    *inputs: torch.Tensor,
    dynamic: Collection[tuple[int, int]] = (),
    functional: bool = True,
) -> GraphModule:
    """The graph of a function of tensors, that returns a tuple.

    Args:
        function: traced on fake twins of `inputs`.
        inputs: example inputs.
        dynamic: pairs of input and dimension whose size is symbolic. Equal ones get one symbol.
        functional: run `functionalize` on it.
    """
    mode = fake_mode()
    values = [
        fake(mode, value, f"input_{index}", [dim for position, dim in dynamic if position == index])
        for index, value in enumerate(inputs)
    ]
    with mode, torch.no_grad():
        module = make_fx(function, pre_dispatch=True)(*values)
    return functionalize(module) if functional else module


def named(module: GraphModule, target: Any) -> list[Node]:
    """The calls of one op, in order."""
    return [node for node in module.graph.nodes if node.op == "call_function" and node.target == target]


def only(module: GraphModule, target: Any) -> Node:
    """The one call of an op."""
    (node,) = named(module, target)
    return node
