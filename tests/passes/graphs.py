"""Small graphs with fake values, as capture leaves them, for testing one pass at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_leaves

from ridgefill_compile.passes.experts import collapse
from ridgefill_compile.passes.functionalize import functionalize
from tests.decoders import cache_of

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
    sizes_first: bool = False,
) -> GraphModule:
    """The graph of a function of tensors, that returns a tuple.

    Args:
        function: traced on fake twins of `inputs`.
        inputs: example inputs.
        dynamic: pairs of input and dimension whose size is symbolic. Equal ones get one symbol.
        functional: run `functionalize` on it.
        sizes_first: the graph takes the sizes of `dynamic` before the tensors, as Dynamo's do; otherwise it reads them
            off its tensors.
    """
    mode = fake_mode()
    values = [
        fake(mode, value, f"input_{index}", [dim for position, dim in dynamic if position == index])
        for index, value in enumerate(inputs)
    ]
    sizes = [values[position].shape[dim] for position, dim in dynamic] if sizes_first else []
    run = (lambda *inputs: function(*inputs[len(sizes) :])) if sizes_first else function
    with mode, torch.no_grad():
        module = make_fx(run, pre_dispatch=True)(*sizes, *values)
    return collapse(functionalize(module)) if functional else module


def named(module: GraphModule, target: Any) -> list[Node]:
    """The calls of one op, in order."""
    return [node for node in module.graph.nodes if node.op == "call_function" and node.target == target]


def only(module: GraphModule, target: Any) -> Node:
    """The one call of an op."""
    (node,) = named(module, target)
    return node


def traced_decoder(
    model: nn.Module, ids: torch.Tensor, dynamic: bool = False, **call: Any
) -> tuple[GraphModule, list[Any]]:
    """The graph of a decoder of transformers, and what to call it with.

    Its results are whatever the model returns, in order, and then every tensor of its cache. Dynamo would take five
    times as long; the ops are the same.

    Args:
        model: a toy decoder.
        ids: prompt, int64 [batch, rows].
        dynamic: batch and rows are symbolic.
        call: further arguments; `use_cache` is True unless said otherwise. Tensors are inputs of the graph.
    """
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    given = {"use_cache": True, **call}
    fed = [name for name, value in given.items() if isinstance(value, torch.Tensor)]

    def run(ids: torch.Tensor, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        arguments = {**given, **dict(zip(fed, values, strict=False))}
        weights = dict(zip(tensors, values[len(fed) :], strict=True))
        output = torch.func.functional_call(model, weights, (ids,), arguments)
        cache = cache_of(output)
        layers = [vars(layer) for layer in (cache.layers if cache is not None else ())]
        own = [value for name, value in output.items() if name not in ("past_key_values", "cache", "cache_params")]
        states = [leaf for leaf in tree_leaves(layers) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
        return (*(leaf for leaf in tree_leaves(own) if isinstance(leaf, torch.Tensor)), *states)

    inputs = [ids, *(given[name] for name in fed), *tensors.values()]
    sizes = [(0, dim) for dim in range(2) if dynamic]
    compiling = "transformers.integrations.moe.is_torchdynamo_compiling"  # show experts as Dynamo sees them
    with mock.patch(compiling, return_value=True):
        module = traced(run, *inputs, dynamic=sizes, sizes_first=True)
    return module, [*(ids.shape[dim] for _, dim in sizes), *inputs]
