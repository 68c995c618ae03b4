"""Small graphs with fake values, as capture leaves them, for testing one pass at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.traceback import get_current_meta, preserve_node_meta
from torch.utils._pytree import tree_leaves

from ridgefill_compile.passes.experts import collapse
from ridgefill_compile.passes.functionalize import functionalize
from ridgefill_compile.testing import source

aten = torch.ops.aten


def fake_mode() -> FakeTensorMode:
    """A fake mode that takes symbolic sizes."""
    return FakeTensorMode(shape_env=ShapeEnv())


def fake(mode: FakeTensorMode, value: Tensor, name: str, dynamic: Collection[int] = ()) -> Tensor:
    """The fake twin of a tensor, strides kept; the sizes of dimensions in `dynamic` are symbolic."""
    kinds = [DimDynamic.DYNAMIC if dim in dynamic else DimDynamic.STATIC for dim in range(value.dim())]
    context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(dynamic_sizes=kinds)
    return mode.from_tensor(value, source=ConstantSource(name), symbolic_context=context)


def traced(
    function: Callable[..., Any],
    *inputs: Tensor,
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


def traced_call(
    model: nn.Module, call: Mapping[str, Any], dynamic: Collection[tuple[str, int]] = ()
) -> tuple[GraphModule, list[Any]]:
    """The graph of one call of a module, and what to call the graph with.

    The graph's inputs are the call's tensors and the module's parameters and buffers. It returns every tensor of the
    module's output, in a flat tuple. Nodes know the submodule that they come from. Dynamo would take several times as
    long; the ops are the same.

    Args:
        model: a module whose output is made of tuples, lists and dicts of tensors.
        call: its arguments by name; what is no tensor is constant.
        dynamic: pairs of argument and dimension whose size is symbolic.
    """
    weights = dict([*model.named_parameters(), *model.named_buffers()])
    fed = [name for name, value in call.items() if isinstance(value, Tensor)]

    def run(*values: Tensor) -> tuple[Tensor, ...]:
        arguments = {**call, **dict(zip(fed, values, strict=False))}
        given = dict(zip(weights, values[len(fed) :], strict=True))
        with _told_by_submodule(model), preserve_node_meta():
            output = torch.func.functional_call(model, given, (), arguments)
        return tuple(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))

    inputs = [*(call[name] for name in fed), *(value.detach() for value in weights.values())]
    module = traced(run, *inputs, dynamic=[(fed.index(name), dim) for name, dim in dynamic])
    shown = f", dynamic={list(dynamic)!r}" if dynamic else ""
    code = [*source.of_model(model), *source.of_call(call), f"before, inputs = traced_call(model, call{shown})"]
    module.meta[source.SOURCE] = code
    return module, inputs


@contextlib.contextmanager
def _told_by_submodule(model: nn.Module) -> Iterator[None]:
    """Nodes that are traced in here get the stack of submodules that run, as Dynamo's have it."""
    stack: list[tuple[str, type]] = []

    def tell() -> None:
        get_current_meta()["nn_module_stack"] = {str(i): entry for i, entry in enumerate(stack)}

    def enter(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, *_: Any) -> None:
            stack.append((name, type(module)))
            tell()

        return hook

    def leave(*_: Any) -> None:
        stack.pop()
        tell()

    handles = []
    for name, module in model.named_modules():
        handles += [module.register_forward_pre_hook(enter(name)), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def named(module: GraphModule, target: Any) -> list[Node]:
    """The calls of one op, in order."""
    return [node for node in module.graph.nodes if node.op == "call_function" and node.target == target]


def only(module: GraphModule, target: Any) -> Node:
    """The one call of an op."""
    (node,) = named(module, target)
    return node
