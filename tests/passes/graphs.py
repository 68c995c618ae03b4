"""Graphs of decoders of transformers, beside those of `ridgefill_compile.testing.graphs`."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from ridgefill_compile.testing.graphs import aten, fake, fake_mode, named, only, traced
from tests.decoders import cache_of

__all__ = ["aten", "fake", "fake_mode", "named", "only", "traced", "traced_decoder"]


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
