"""How long a tail no fill at all could afford: the control of equal cost to a fill."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from ridgefill_compile.apart import compile_apart
from ridgefill_compile.capture import capture
from ridgefill_compile.cost import multiply_adds
from ridgefill_compile.errors import CannotFill, RidgefillError
from ridgefill_compile.maps import RidgeMaps
from ridgefill_compile.options import Options
from ridgefill_compile.passes.locate import locate
from ridgefill_compile.passes.narrow import narrow
from ridgefill_compile.passes.route import Fill, route
from ridgefill_compile.recurrences.substitute import substitute_recurrences


class _Captured(Exception):
    """No error: the way out of a model that is not to run."""


def longer_tail(model: Any, maps: RidgeMaps, rows: int, tail: int) -> int:
    """The longest tail with which a prompt without a fill (route "none") takes no more multiply-adds than with one.

    Args:
        model: a transformers model for causal language modelling; it is traced, and does not run.
        maps: of the fill, at their default split.
        rows: of the prompt, N.
        tail: of the fill, T; fewer than N.

    Raises:
        CannotFill: late layers whose prefix cannot be hidden from the tail, or no longer tail would leave rows to fill.
        RidgefillError: the model was not traced.
    """
    found: list[GraphModule] = []

    refusals: list[Exception] = []

    def backend(module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            found.append(capture(module))
        except Exception as error:  # whatever it is, Dynamo would wrap it in one of its own
            refusals.append(error)
        raise _Captured

    substitute_recurrences(model)
    device = next(model.parameters()).device
    with torch.no_grad(), contextlib.suppress(_Captured, torch._dynamo.exc.BackendCompilerFailed):
        ids = torch.ones(1, rows, dtype=torch.int64, device=device)
        compile_apart(model, backend, dynamic=False)(input_ids=ids, use_cache=True, logits_to_keep=1)
    if refusals:
        raise refusals[0]
    if not found:
        raise RidgefillError("the model was not traced: torch.compile is switched off, or its forward breaks at once")
    located = locate(found[0].graph)

    def cost(fill: Fill) -> int:
        return int(multiply_adds(narrow(route(found[0], located, fill)).result.graph))

    ridge = Fill("ridge", maps.split, tail, maps, first_rows=maps.first_rows, cut=maps.cut)
    tails = range(tail, rows - Options.min_fill + 1)
    if not tails:
        raise CannotFill(f"a tail of more than {tail} of {rows} rows leaves too few to fill", hint="take longer texts")
    dearer = bisect.bisect_right(tails, cost(ridge), key=lambda longer: cost(Fill("none", maps.split, longer)))
    return tails[max(dearer - 1, 0)]
