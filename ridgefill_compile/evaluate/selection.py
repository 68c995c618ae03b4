"""Which prefix rows selectors keep exact, told without a fill: only the layers below the split are run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from ridgefill_compile.capture import capture
from ridgefill_compile.errors import RidgefillError
from ridgefill_compile.passes.emit import Emitter, copy_module, fake_mode_of, inputs_of
from ridgefill_compile.passes.experts import expand
from ridgefill_compile.passes.locate import locate
from ridgefill_compile.passes.select_rows import select_rows
from ridgefill_compile.selectors import Selector, parse_rows


class _Selected(Exception):
    """No error: the way out of a model whose late layers are not to run. Carries the positions."""

    def __init__(self, positions: Sequence[Tensor]) -> None:
        super().__init__()
        self.positions = positions


def selection(
    model: Any, split: int, tail: int, rows: Mapping[str, Any], first_rows: int = 0
) -> Callable[[Tensor], dict[str, Tensor]]:
    """A function of ids [1, N]: the positions that each of some selectors chooses, int64 [count] by name, ascending.

    They are those of a fill with the same split and tail, computed by the same pass. Compiled when first called.

    Args:
        model: a transformers model for causal language modelling.
        split: first late layer.
        tail: last prompt rows, which are not to choose from.
        rows: name -> what option `rows` takes. Selectors that read the ids' table or late layers are not for this.
        first_rows: rows that begin the sequence and are kept whatever selectors choose.

    Raises:
        OptionError: `rows` holds what is no selector.
    """
    selectors = {name: parse_rows(spec) for name, spec in rows.items()}

    def backend(module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        selecting = _selecting(capture(module), split, tail, list(selectors.values()), first_rows)

        def run(*inputs: Any) -> Any:
            raise _Selected(selecting(*inputs))

        return run

    compiled: Any = torch.compile(model, backend=backend)

    def positions(ids: Tensor) -> dict[str, Tensor]:
        try:
            with torch.no_grad():
                compiled(input_ids=ids, use_cache=True, logits_to_keep=1)
        except _Selected as selected:
            return dict(zip(selectors, selected.positions, strict=True))
        raise RidgefillError("no rows were selected: the model ran uncompiled")

    return positions


def _selecting(
    captured: GraphModule, split: int, tail: int, selectors: Sequence[Sequence[Selector]], first_rows: int
) -> Callable[..., Any]:
    """A captured graph that returns positions, and computes no more than they need."""
    located = locate(captured.graph)
    result = copy_module(captured)
    copies = dict(zip(captured.graph.nodes, result.graph.nodes, strict=True))
    emit = Emitter(result.graph, fake_mode_of(result.graph))
    for node in inputs_of(result.graph):
        emit.know(node)
    found = [select_rows(emit, copies, located, split, tail, each, first_rows=first_rows) for each in selectors]
    result.graph.output_node().args = (tuple(found),)
    result.graph.eliminate_dead_code()
    result.recompile()
    return expand(result)
