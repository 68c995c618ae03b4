"""Runs a model exactly while collecting what ridge maps are fitted on: sums over layer inputs, or the inputs.

Where maps predict projections, these take the place of late layers' inputs in the sums.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from ridgefill_compile.apart import compile_apart
from ridgefill_compile.backend import inner_compiler
from ridgefill_compile.capture import capture
from ridgefill_compile.errors import CalibrationError, CannotFill, OptionError, RidgefillError
from ridgefill_compile.options import Options
from ridgefill_compile.passes.accumulate import Extra, accumulate
from ridgefill_compile.passes.cuts import cuts_of, widths_of
from ridgefill_compile.passes.experts import expand
from ridgefill_compile.passes.locate import Located, locate
from ridgefill_compile.passes.outputs import check_late_states
from ridgefill_compile.recurrences.substitute import substitute_recurrences
from ridgefill_compile.ridge import RidgeStatistics
from ridgefill_compile.splitmaps import INPUT


class StateCollector:
    """Compiles a model's exact forward with accumulators as added results, and hands them out call by call.

    Args:
        model: a causal decoder; called as `model(input_ids=.., use_cache=True, logits_to_keep=1)`, as far as its
            `forward` takes these.
        splits: first late layers to fit maps for.
        stride: rows 0, stride, 2 * stride, ... are taken.
        inner: compiler of the rewritten graph ("eager", "aot_eager" or "inductor").
        cut: what is predicted of late layers, one of `splitmaps.CUTS`.
        by_length: every row has the weight 1, see `ridge.py`.

    Attributes:
        widths: layer -> widths of its projections, where they are predicted; known after the first call.

    Raises:
        CalibrationError: at the first call: no layers found, a split out of range, a graph break, or a late layer
            without projections.
    """

    def __init__(
        self,
        model: nn.Module,
        splits: Sequence[int],
        stride: int = 4,
        inner: str = "eager",
        cut: str = INPUT,
        by_length: bool = False,
    ) -> None:
        self.model = model
        self.cut, self.by_length = cut, by_length
        self.widths: dict[int, tuple[int, ...]] = {}
        self.splits = tuple(splits)
        self.stride = stride
        self.options = Options(route="exact", inner=inner)
        self.located: Located | None = None
        self._extras: list[Extra] = []
        self._values: list[Tensor] = []
        substitute_recurrences(model)
        self._compiled = {rows: compile_apart(model, self._backend(rows)) for rows in (False, True)}
        self._arguments = call_arguments(model)

    @property
    def layers(self) -> int:
        """Layers that write states; known after the first call."""
        if self.located is None:
            raise CalibrationError("the model has not run yet: call locate(input_ids) first")
        return len(self.located.layers)

    def locate(self, input_ids: Tensor) -> Located:
        """Find the layers by running one short exact pass, input_ids [1, rows]."""
        if self.located is None:
            self._run(input_ids, rows=True)
        assert self.located is not None
        return self.located

    def sums(self, input_ids: Tensor) -> dict[int, RidgeStatistics]:
        """Sums over the taken rows of input_ids [batch, rows], for each split, in float64."""
        found = self._run(input_ids, rows=False)
        rows = input_ids.shape[0] * -(-input_ids.shape[1] // self.stride)
        statistics = {}
        for split in self.splits:
            mine = [value for extra, value in found if extra.of == split]
            statistics[split] = RidgeStatistics.of_sums(split, rows, range(split + 1, self.layers), mine)
        return statistics

    def rows(self, input_ids: Tensor) -> dict[int, Tensor]:
        """Inputs of every layer from the first split on, on the taken rows of input_ids [batch, rows]: [taken, d].

        Behind an input stand the layer's projections, where they are predicted: [taken, d + widths].
        """
        return {extra.of: value for extra, value in self._run(input_ids, rows=True)}

    def _run(self, input_ids: Tensor, rows: bool) -> list[tuple[Extra, Tensor]]:
        self._values = []
        call_compiled(self._compiled[rows], input_ids, self._arguments, lambda: bool(self._values))
        return list(zip(self._kinds(rows), self._values, strict=True))

    def _kinds(self, rows: bool) -> list[Extra]:
        return [extra for extra in self._extras if (extra.kind == "rows") == rows]

    def _backend(self, rows: bool) -> Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]:
        return raising_when_called(partial(self._compile, rows=rows))

    def _compile(self, module: GraphModule, example_inputs: Sequence[Any], rows: bool) -> Callable[..., Any]:
        captured = capture(module)
        located = locate(captured.graph)
        count = len(located.layers)
        if min(self.splits) < 0 or max(self.splits) >= count:
            raise OptionError(f"splits {self.splits} must lie in 0..{count - 1}: {count} layers write states")
        if self.located is not None and count != len(self.located.layers):
            raise CannotFill("the model ran as several graphs", hint="remove what breaks the graph")
        check_late_states(captured.graph, located, min(self.splits))
        cuts = cuts_of(located, min(self.splits), self.cut) if self.cut != INPUT else ()
        result, extras = accumulate(captured, located, self.splits, self.stride, rows, cuts, self.by_length)
        self.located, self.widths = located, widths_of(cuts)
        self._extras = [e for e in self._extras if (e.kind == "rows") != rows] + extras
        compiled = inner_compiler(self.options)(expand(result), example_inputs)
        added = len(extras)

        def run(*inputs: Any) -> Any:
            results = compiled(*inputs)
            self._values = list(results[-added:])
            return results[:-added]

        return run


def call_arguments(model: nn.Module) -> dict[str, Any]:
    """What a model is called with beside ids: a cache, and one row of logits, as far as its `forward` takes them."""
    accepted = inspect.signature(model.forward).parameters
    everything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    wanted = {"use_cache": True, "logits_to_keep": 1}
    return {name: value for name, value in wanted.items() if everything or name in accepted}


def call_compiled(
    compiled: Callable[..., Any], input_ids: Tensor, arguments: Mapping[str, Any], has_run: Callable[[], bool]
) -> None:
    """Run a compiled model on ids [batch, rows] for what its graph leaves behind; `has_run`: whether it did.

    Raises:
        CalibrationError: ids outside the vocabulary, or the model ran uncompiled.
    """
    try:
        with torch.no_grad():
            compiled(input_ids, **arguments)
    except IndexError as error:
        span = f"{int(input_ids.min())}..{int(input_ids.max())}"
        raise CalibrationError(f"the model takes no token ids of {span}: {error}") from error
    if not has_run():
        raise CalibrationError("the compiled model did not run: torch.compile is switched off, or gave up recompiling")


def raising_when_called(
    compile_graph: Callable[[GraphModule, Sequence[Any]], Callable[..., Any]],
) -> Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]:
    """A backend whose refusals are raised at the call: raised while compiling, Dynamo would wrap them.

    Raises:
        OptionError: the backend's own.
        CalibrationError: for whatever else the backend refuses.
    """

    def backend(module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            return compile_graph(module, example_inputs)
        except RidgefillError as error:
            failure = error

            def fail(*inputs: Any) -> Any:
                if isinstance(failure, OptionError):
                    raise failure
                raise CalibrationError(f"this model cannot be calibrated: {failure}") from failure

            return fail

    return backend
