"""The same values in forms of which Inductor makes fast code (torch 2.13, C++). The last pass.

Convolutions of one channel each, which recurrent layers run over all rows, become sums of shifted products:

    y = conv1d(x, w, groups=C, padding=p)      [B, C, N]      p = pad(x, p);  y = sum_i p[..., i:i + N] * w[:, i]

They are fused with what stands around them; the library's kernel copies its operand into a layout of its own, and back.
In a type of 16 bits the sum is as exact as the kernel's only in Inductor's loops, which compute in float32.
On a 2-core CPU, 4,096 rows of 1,536 channels, kernel 4, with the SiLU and the split behind it: 37.8 ms and 6.7 ms.

Tables of positions (rotary cosines and sines) are computed once:

    c = cos(angles)   [1, N, D]    q0 * c, k0 * c, q1 * c, ...      c = computed_once(cos(angles)); ...

Inductor would write the cosine into every loop that reads it: once a head, twice a layer.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ridgefill_compile.passes.calls import TO_THE_END, arguments, aten, shape
from ridgefill_compile.passes.emit import Emitter, copy_module, fake_mode_of
from ridgefill_compile.passes.functionalize import memory_of
from ridgefill_compile.passes.rows import same

LONGEST_KERNEL = 8  # taps of a convolution that is worth writing out
WAVES = (aten.cos.default, aten.sin.default, aten.polar.default)


@torch.library.custom_op("ridgefill::computed_once", mutates_args=())
def computed_once(value: Tensor) -> Tensor:
    """A copy of a value. The inner compiler does not look inside, so what it is made of is computed where it stands."""
    return value.clone()


@computed_once.register_fake
def _(value: Tensor) -> Tensor:
    return value.clone()


def lower(module: GraphModule) -> GraphModule:
    """A graph module with the same results, for Inductor."""
    module = copy_module(module)
    emit = Emitter(module.graph, fake_mode_of(module.graph))
    for node in list(module.graph.nodes):
        if node.target is aten.conv1d.default and _one_channel_each(node):
            _shifted_products(emit, node)
    for table in list(_tables(module)):
        with module.graph.inserting_after(table):
            once = emit(torch.ops.ridgefill.computed_once.default, table, like=table)
        for reader in list(table.users):
            if reader is not once:
                reader.replace_input_with(table, once)
    module.recompile()
    return module


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


def _tables(module: GraphModule) -> Iterator[Node]:
    """Values that are made of positions by cosines and sines, and that several values of tokens are made of."""
    of_tokens: set[Node] = set()
    waves: set[Node] = set()
    for node in module.graph.nodes:
        if not isinstance(node.meta.get("val"), Tensor | list | tuple):
            continue  # a size
        if any(operand in of_tokens for operand in node.all_input_nodes) or _is_matrix(node):
            of_tokens.add(node)
        elif node.target in WAVES or any(operand in waves for operand in node.all_input_nodes):
            waves.add(node)
    readers: dict[Node, int] = {}
    for value in waves:
        count = sum(user in of_tokens for user in value.users)
        if count:
            memory = memory_of(value)
            readers[memory] = readers.get(memory, 0) + count
    for table in sorted(waves):
        held = table.meta["val"]
        if readers.get(table, 0) > 1 and isinstance(held, Tensor) and held.is_floating_point():
            yield table


def _is_matrix(node: Node) -> bool:
    """Whether an input is a weight with which tokens or hidden states are multiplied, or a cache."""
    value = node.meta.get("val")
    return node.op == "placeholder" and isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1
