"""The same values in forms of which Inductor makes fast code (torch 2.13, C++). The last pass.

Convolutions of one channel each, which recurrent layers run over all rows, become sums of shifted products:

    y = conv1d(x, w, groups=C, padding=p)      [B, C, N]      p = pad(x, p);  y = sum_i p[..., i:i + N] * w[:, i]

They are fused with what stands around them; the library's kernel copies its operand into a layout of its own, and back.
In a type of 16 bits the sum is as exact as the kernel's only in Inductor's loops, which compute in float32.
On a 2-core CPU, 4,096 rows of 1,536 channels, kernel 4, with the SiLU and the split behind it: 37.8 ms and 6.7 ms.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from ridgefill_compile.passes.calls import TO_THE_END, arguments, aten, shape
from ridgefill_compile.passes.emit import Emitter, copy_module, fake_mode_of
from ridgefill_compile.passes.rows import same

LONGEST_KERNEL = 8  # taps of a convolution that is worth writing out


def lower(module: GraphModule) -> GraphModule:
    """A graph module with the same results, for Inductor."""
    if not _convolutions(module):
        return module
    module = copy_module(module)
    emit = Emitter(module.graph, fake_mode_of(module.graph))
    for node in _convolutions(module):
        _shifted_products(emit, node)
    module.recompile()
    return module


def _convolutions(module: GraphModule) -> list[Node]:
    return [node for node in module.graph.nodes if node.target is aten.conv1d.default and _one_channel_each(node)]


def _one_channel_each(node: Node) -> bool:
    given = arguments(node)
    weight, channels = shape(given["weight"]), shape(given["input"])[1]
    known = all(
        isinstance(given[name], list | tuple) and isinstance(given[name][0], int) for name in ("padding", "dilation")
    )
    plain = len(shape(node)) == 3 and list(given["stride"]) == [1] and known
    own = same(weight[0], channels) and given["groups"] == channels and isinstance(weight[2], int)
    return bool(plain and own and weight[2] <= LONGEST_KERNEL)


def _shifted_products(emit: Emitter, node: Node) -> None:
    """Write a convolution as one product for each tap, and their sum."""
    given = arguments(node)
    taps, step = int(shape(given["weight"])[2]), int(given["dilation"][0])
    with emit.graph.inserting_before(node):
        value, padding = given["input"], int(given["padding"][0])
        if padding:
            value = emit(aten.constant_pad_nd.default, value, [padding, padding], like=node)
        weight = emit(aten.squeeze.dim, given["weight"], 1, like=node)
        total: Node | None = None
        for tap in range(taps):
            behind = step * (taps - 1 - tap)
            there = emit(aten.slice.Tensor, value, 2, step * tap, -behind if behind else TO_THE_END, like=node)
            factor = emit(aten.slice.Tensor, weight, 1, tap, tap + 1, like=node)
            product = emit(aten.mul.Tensor, there, factor, like=node)
            total = product if total is None else emit(aten.add.Tensor, total, product, like=node)
        assert total is not None
        if given["bias"] is not None:
            total = emit(aten.add.Tensor, total, emit(aten.unsqueeze.default, given["bias"], 1, like=node), like=node)
    node.replace_all_uses_with(total)
    emit.graph.erase_node(node)
