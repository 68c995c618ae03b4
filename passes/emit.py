"""Writing new nodes: every one gets its fake value at once, so that later passes and the verifier see shapes."""

from __future__ import annotations

import operator
from contextlib import nullcontext
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from ridgefill_compile.errors import CannotFill
from ridgefill_compile.passes.calls import aten, shape
from ridgefill_compile.passes.rows import IntLike, same


class Emitter:
    """Adds call nodes to a graph, at its insert point, with their fake values.

    Attributes:
        graph: the graph being written.
        mode: the fake mode of its values.
        memo: nodes shared between callers, such as one mask for all layers.
    """

    def __init__(self, graph: Graph, mode: FakeTensorMode) -> None:
        self.graph = graph
        self.mode = mode
        self.memo: dict[Any, Node] = {}
        self._sizes: list[tuple[torch.SymInt, Node, int | None]] = []

    def __call__(self, target: Any, *args: Any, like: Node | None = None, **kwargs: Any) -> Node:
        """Add `target(*args, **kwargs)`. `like`: node whose source line and module it inherits."""
        node = self.graph.call_function(target, args, kwargs)
        if like is not None:
            node.meta = {key: value for key, value in like.meta.items() if key not in ("val", "tensor_meta")}
        node.meta["val"] = self.value_of(node)
        return node

    def value_of(self, node: Node) -> Any:
        """The node's value on its operands' fake values."""
        args = map_arg(node.args, lambda n: n.meta["val"])
        kwargs = map_arg(node.kwargs, lambda n: n.meta["val"])
        target: Any = node.target
        # Some shape functions take symbolic sizes only under Python's dispatcher, which is slow to start.
        symbolic = self.mode.shape_env is not None and bool(self.mode.shape_env.var_to_range)
        with self.mode, enable_python_dispatcher() if symbolic else nullcontext(), torch.no_grad():
            return target(*args, **kwargs)

    def guards(self) -> list[Any]:
        """Conditions on symbolic sizes that hold the graph to some lengths."""
        return [] if self.mode.shape_env is None else self.mode.shape_env.guards

    def know(self, node: Node) -> None:
        """Remember the symbolic sizes that an input of the graph shows."""
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            self._sizes.insert(0, (value, node, None))
        elif isinstance(value, torch.Tensor):
            for dim, size in enumerate(shape(node)):
                if isinstance(size, torch.SymInt) and not any(same(size, known) for known, _, _ in self._sizes):
                    self._sizes.append((size, node, dim))

    def size(self, value: IntLike) -> int | Node:
        """A size as an argument: a plain number, or the node that holds it.

        Raises:
            CannotFill: a symbolic size that no input of the graph shows.
        """
        if isinstance(value, int):
            return value
        for known, node, dim in self._sizes:
            if same(known, value):
                return node if dim is None else self._once(aten.sym_size.int, node, dim)
        raise CannotFill(f"the size {value} is not among the graph's inputs")

    def minus(self, left: int | Node, right: int) -> int | Node:
        """`left - right` of sizes."""
        return left - right if isinstance(left, int) else self._once(operator.sub, left, right)

    def _once(self, target: Any, *args: Any) -> Node:
        if (target, args) not in self.memo:
            self.memo[target, args] = self(target, *args)
        return self.memo[target, args]


def fake_mode_of(graph: Graph) -> FakeTensorMode:
    """The fake mode that a captured graph's values belong to."""
    for node in graph.nodes:
        for value in tree_leaves(node.meta.get("val")):
            if isinstance(value, FakeTensor):
                return value.fake_mode
    raise CannotFill("the graph computes no tensor")


def inputs_of(graph: Graph) -> list[Node]:
    """A graph's placeholders."""
    return [node for node in graph.nodes if node.op == "placeholder"]


def copy_module(module: GraphModule) -> GraphModule:
    """A graph module with a graph of its own and the same tensors: what a pass may change freely."""
    graph = Graph()
    values: dict[Node, Node] = {}
    result = graph.graph_copy(module.graph, values)
    output = graph.output(result)
    old = module.graph.output_node()
    output.meta = dict(old.meta)
    copy = GraphModule(module, graph)
    copy.meta = dict(module.meta)
    return copy
