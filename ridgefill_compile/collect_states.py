"""Runs a model exactly and filled, and collects the states that late recurrences end a prompt with."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from ridgefill_compile.apart import compile_apart
from ridgefill_compile.backend import inner_compiler
from ridgefill_compile.capture import capture
from ridgefill_compile.collect import call_arguments, call_compiled, raising_when_called
from ridgefill_compile.errors import CannotFill
from ridgefill_compile.fill import choose_fill, first_rows
from ridgefill_compile.maps import RidgeMaps
from ridgefill_compile.options import Options
from ridgefill_compile.passes.eliminate import eliminate
from ridgefill_compile.passes.emit import Emitter, fake_mode_of
from ridgefill_compile.passes.experts import expand
from ridgefill_compile.passes.locate import locate
from ridgefill_compile.passes.outputs import check_late_states
from ridgefill_compile.passes.route import route
from ridgefill_compile.passes.terminal_state import late_scans
from ridgefill_compile.recurrences.substitute import substitute_recurrences

Differences = dict[int, dict[int, Tensor]]
"""Split -> late layer -> exact state minus filled one, float64 [batch, heads, key, value]."""


class TerminalStateCollector:
    """Compiles a model's exact forward and a fill of every row from each split, and compares the states at the end.

    A filled row adds to a late state what its predicted input says, wherever the tail begins: so the state behind a
    window that is filled whole is the one behind a prefix of the same rows.

    Args:
        model: a causal decoder, as for `collect.StateCollector`.
        maps: its maps, of every split to compare.
        inner: compiler of the rewritten graphs ("eager", "aot_eager" or "inductor").

    Raises:
        CalibrationError: at the first call: the maps are of another model, no late layer has a state to compare, or a
            graph break.
    """

    def __init__(self, model: nn.Module, maps: RidgeMaps, inner: str = "eager") -> None:
        self.maps = maps
        self.inner = inner
        self._found: list[Differences] = []
        substitute_recurrences(model)
        self._compiled = compile_apart(model, raising_when_called(self._compile))
        self._arguments = call_arguments(model)

    def differences(self, input_ids: Tensor) -> Differences:
        """Of the states behind input_ids [batch, rows]."""
        self._found = []
        call_compiled(self._compiled, input_ids, self._arguments, lambda: bool(self._found))
        return self._found[-1]

    def _compile(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        captured = capture(module)
        located = locate(captured.graph)
        scans = {split: late_scans(located, split).found for split in self.maps.splits}
        layers = sorted(set().union(*scans.values()))
        if not layers:
            raise CannotFill("no late layer has a recurrence whose state could be corrected")
        every = {layer: scan for found in scans.values() for layer, scan in found.items()}
        check_late_states(captured.graph, located, min(self.maps.splits))
        add_states(captured, [every[layer] for layer in layers])
        compile_inner = inner_compiler(Options(route="exact", inner=self.inner))
        filled = {}
        for split in self.maps.splits:
            options = Options(maps=self.maps, split=split)
            fill = replace(choose_fill(located, options, example_inputs), tail=0, first_rows=first_rows(options))
            routed = states_alone(route(captured, located, fill), len(layers))
            # Elimination counts selected rows from where the tail begins, and there is none.
            lowered = routed if fill.first_rows else eliminate(routed)
            filled[split] = compile_inner(expand(lowered), example_inputs)
        exact = compile_inner(expand(captured), example_inputs)

        def run(*inputs: Any) -> Any:
            results = exact(*inputs)
            truth = dict(zip(layers, results[-len(layers) :], strict=True))
            found: Differences = {}
            for split, run_filled in filled.items():
                states = dict(zip(layers, run_filled(*inputs), strict=True))
                found[split] = {layer: truth[layer].double() - states[layer].double() for layer in scans[split]}
            self._found = [found]
            return results[: -len(layers)]

        return run


def add_states(module: GraphModule, scans: Sequence[Node]) -> None:
    """Return the final states of recurrences, too, behind all other results."""
    output = module.graph.output_node()
    emit = Emitter(module.graph, fake_mode_of(module.graph))
    with module.graph.inserting_before(output):
        states = [emit(operator.getitem, scan, 1, like=scan) for scan in scans]
    results = output.args[0]
    assert isinstance(results, list | tuple)
    output.args = ((*results, *states),)
    module.recompile()


def states_alone(module: GraphModule, count: int) -> GraphModule:
    """The module, with its last `count` results for all."""
    output = module.graph.output_node()
    results = output.args[0]
    assert isinstance(results, list | tuple)
    output.args = (tuple(results[-count:]),)
    module.recompile()
    return module
