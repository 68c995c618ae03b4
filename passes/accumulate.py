"""The calibration rewrite: nothing is replaced; what the ridge fit needs of each layer is returned beside.

    results, ...   ->   results, ..., for each split S and late layer l > S, on every `stride`-th row, in float64:
                        sum w, sum w x_S [d_in], x_S^T w x_S [d_in, d_in],
                        sum w y_l [d_out], x_S^T w y_l [d_in, d_out]

where x_S is the split state, y_l what maps predict of a late layer (its input x_l, or its projections side by side),
and w the rows' weights (see `ridgefill_compile/ridge.py`).
Or, to score maps on held-out text, those rows themselves: x_l, and behind it projections, [rows / stride, d] of every
layer from the first split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ridgefill_compile.passes.calls import TO_THE_END, aten
from ridgefill_compile.passes.cuts import Cut
from ridgefill_compile.passes.emit import Emitter, copy_module, fake_mode_of, inputs_of
from ridgefill_compile.passes.inline import inline
from ridgefill_compile.passes.locate import Located
from ridgefill_compile.ridge import weighted_sums


@dataclass(frozen=True)
class Extra:
    """What one added result holds: the rows of a layer; or the next of the sums of a split, as `weighted_sums` has
    them, with the late layers ascending.
    """

    kind: str  # "rows" or "sums"
    of: int


def accumulate(
    module: GraphModule,
    located: Located,
    splits: Sequence[int],
    stride: int,
    rows: bool = False,
    cuts: Sequence[Cut] = (),
    by_length: bool = False,
) -> tuple[GraphModule, list[Extra]]:
    """A copy of the module with accumulators as added results, and what each of them is.

    Args:
        module: captured graph that `located` was found in.
        located: its anatomy.
        splits: splits to fit maps for, each in `0..layers-1`.
        stride: take rows 0, stride, 2 * stride, ...
        rows: return the rows themselves rather than their sums.
        cuts: what is predicted, of every layer behind the first split; none: the layers' inputs.
        by_length: every row has the weight 1.
    """
    result = copy_module(module)
    copies = dict(zip(module.graph.nodes, result.graph.nodes, strict=True))
    emit = Emitter(result.graph, fake_mode_of(result.graph))
    for node in inputs_of(result.graph):
        emit.know(node)
    output = result.graph.output_node()

    def summing(x: Tensor, *y: Tensor) -> list[Tensor]:
        return weighted_sums(x, y, by_length)

    extras: list[Extra] = []
    added: list[Node] = []

    def add(values: Sequence[Node], kind: str, of: int) -> None:
        extras.extend(Extra(kind, of) for _ in values)
        added.extend(values)

    with result.graph.inserting_before(output):
        taken = {
            layer.index: _taken_rows(emit, copies[layer.input], located.row_dim, stride)
            for layer in located.layers[min(splits) :]
        }
        parts: dict[int, list[Node]] = {}
        for cut in cuts:
            part = _taken_rows(emit, copies[cut.value], located.row_dim, stride)
            parts.setdefault(cut.layer, []).append(part)
        if rows:
            for index, value in taken.items():
                add([_beside(emit, [value, *parts.get(index, ())])], "rows", index)
        else:
            predicted = {i: _beside(emit, parts.get(i, [value])) for i, value in taken.items()}
            summed = dict.fromkeys([*predicted.values(), *(taken[split] for split in splits)])
            double = {value: emit(aten.to.dtype, value, torch.float64) for value in summed}
            for split in splits:
                late = [double[value] for i, value in predicted.items() if i > split]
                add(inline(emit, summing, [double[taken[split]], *late]), "sums", split)
    results = output.args[0]
    assert isinstance(results, list | tuple)
    output.args = ((*results, *added),)
    result.graph.lint()
    result.recompile()
    return result, extras


def _taken_rows(emit: Emitter, value: Node, row_dim: int, stride: int) -> Node:
    """Every `stride`-th row of a layer's input or projection, [taken rows of all samples, d]."""
    some = emit(aten.slice.Tensor, value, row_dim, 0, TO_THE_END, stride, like=value)
    return emit(aten.reshape.default, some, [-1, int(value.meta["val"].shape[-1])], like=value)


def _beside(emit: Emitter, values: Sequence[Node]) -> Node:
    """Columns of several values [taken rows, d] as those of one."""
    return values[0] if len(values) == 1 else emit(aten.cat.default, [*values], 1)
