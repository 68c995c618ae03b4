"""Where tracing ends: Dynamo's graph becomes functional pre-dispatch ATen, with whole ops, shapes and module stacks.

Dynamo's graph speaks the language of the model's source (`F.linear`, `x.view`, `operator.add`): several spellings for
each operation. Re-running it under make_fx, before autograd and backends take composite ops apart, leaves about 90
distinct ATen ops, `aten.linear` and `aten.scaled_dot_product_attention` among them. Mixtures of experts, which
are several ops in one, become one call (`passes/experts.py`); whoever hands the graph on writes them out again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from ridgefill_compile.errors import CannotFill
from ridgefill_compile.passes.emit import inputs_of
from ridgefill_compile.passes.experts import collapse
from ridgefill_compile.passes.functionalize import functionalize

ARGUMENT = "ridgefill_argument"  # meta key of an input: Dynamo's name for it, which tells the model's argument


def capture(module: GraphModule) -> GraphModule:
    """Functional ATen graph of a Dynamo graph: same inputs, same outputs, fake values in `meta["val"]`.

    The fake tensors are Dynamo's own, in Dynamo's own fake mode: only so do its symbolic sizes survive.

    Raises:
        CannotFill: an input without a fake value, or a write in place that cannot be made functional.
    """
    inputs = inputs_of(module.graph)
    values = [node.meta.get("example_value") for node in inputs]
    for node, value in zip(inputs, values, strict=True):
        if value is None:
            raise CannotFill("an input of the graph has no example value", node)
    mode = _fake_mode(values)

    def run(*args: Any) -> Any:
        return Interpreter(module).run(*args)

    with mode, preserve_node_meta(), torch.no_grad():
        traced = make_fx(run, pre_dispatch=True)(*values)
    for new, old in zip(inputs_of(traced.graph), inputs, strict=True):
        new.meta = {**old.meta, **new.meta, ARGUMENT: old.name}
    for node in traced.graph.nodes:  # make_fx records constants in a fake mode of its own
        if node.op == "get_attr":
            if isinstance(getattr(traced, node.target), FakeTensor):
                raise CannotFill("a value was computed while tracing and is not in the graph", node)
            node.meta["val"] = mode.from_tensor(getattr(traced, node.target), static_shapes=True)
    return collapse(functionalize(traced))


def _fake_mode(values: list[Any]) -> FakeTensorMode:
    for value in values:
        if isinstance(value, FakeTensor):
            return value.fake_mode
    raise CannotFill("the graph has no tensor input")
