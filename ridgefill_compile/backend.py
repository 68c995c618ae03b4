"""Where running begins: `torch.compile(model, backend="ridgefill", options={...})`.

Each graph Dynamo hands over is either filled (capture, locate, route, eliminate, inner compiler) or compiled exactly as
the model wrote it, with a reason in `report(model)`. The one place that catches `CannotFill` is here.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch.fx import GraphModule
from torch.utils.weak import WeakIdKeyDictionary

from ridgefill_compile.errors import CannotFill, MapsError, OptionError, RidgefillError, RidgefillWarning
from ridgefill_compile.fill import fill_graph, first_rows, load_maps, other_weights, stamp_of
from ridgefill_compile.options import Options
from ridgefill_compile.passes.emit import inputs_of
from ridgefill_compile.pieces import WHOLE, Chunk, InPieces, Sizes, counting_rows, in_pieces
from ridgefill_compile.plan import plan, prompt_rows
from ridgefill_compile.recurrences.retrace import retrace_with_operators
from ridgefill_compile.report import GraphReport, remember

Compiled = Callable[..., Any]


def ridgefill(
    module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Compiled:
    """The backend, as `torch.compile` calls it for every graph.

    Args:
        module: Dynamo's graph.
        example_inputs: what it is called with: parameters, token ids, sizes, ...
        mode: `torch.compile`'s mode, for Inductor.
        options: see `ridgefill_compile.options.Options`.

    Raises:
        OptionError: an option is unknown or its value cannot be used.
        MapsError: the maps cannot be read.
        CannotFill: under `strict=True`, when a prompt worth filling cannot be filled.
        Retrace: to Dynamo alone, which then traces the model again.
    """
    retrace_with_operators(module)
    try:
        return compile_graph(module, example_inputs, Options.parse(options, mode))
    except RidgefillError as error:
        return _raise_when_called(error)


def _bug(error: Exception) -> CannotFill:
    return CannotFill(
        f"a pass failed: {type(error).__name__}: {error}",
        hint="this is a bug of ridgefill-compile: please report it, with what strict=True raises",
    )


def _raise_when_called(error: RidgefillError) -> Compiled:
    """A function that raises at the user's call: raised here, Dynamo would wrap the error in one of its own."""

    def fail(*inputs: Any) -> Any:
        raise error

    return fail


def compile_graph(module: GraphModule, example_inputs: Sequence[Any], options: Options) -> Compiled:
    """Fill a graph, or compile it exactly and say why."""
    graph_report = GraphReport(route=options.route, tail=options.tail)
    compiled_so_far = remember(parameters_of(example_inputs), graph_report)
    graph_report.graph_break = graph_break(module)
    warn_of_limit(compiled_so_far)
    lowered = module
    try:
        decided = plan(module, options)
        graph_report.rows, graph_report.dynamic = decided.rows, decided.dynamic
        if decided.fill:
            lowered = fill_graph(module, example_inputs, options, graph_report)
            graph_report.filled = True
            graph_report.reason = (
                f"prefix rows are filled from layer {graph_report.split} on"
                if options.route != "lossless"
                else "rows that nobody reads are dropped, and nothing is predicted"
            )
        else:
            graph_report.reason = decided.reason
    except (OptionError, MapsError):
        raise
    except Exception as error:  # whatever goes wrong in a pass, the model can still answer exactly
        refuse(error, options, graph_report)

    def lower(values: Sequence[Any], inputs: Sequence[Any]) -> Compiled:
        return _lower(lowered, values, module, inputs, options, graph_report)

    one_row = graph_report.rows == 1 and not graph_report.dynamic
    if graph_report.rows is None or options.route in ("exact", "lossless"):
        return lower(example_inputs, example_inputs)
    if one_row:
        return counting_rows(lower(example_inputs, example_inputs), options)
    # Of a prompt in pieces this graph may not be wanted, but those of its chunks.
    ready = None if in_pieces() else lower(example_inputs, example_inputs)
    return InPieces(
        module,
        ready,
        lambda inputs: lower(fake_values(lowered), inputs),
        options,
        graph_report.filled,
        partial(compile_chunk, module, options),
        partial(first_rows, options),
        lambda: None if options.maps is None else load_maps(options.maps).tokens,
    )


def fake_values(module: GraphModule) -> list[Any]:
    """What a graph's inputs were when it was traced."""
    return [node.meta.get("example_value", node.meta.get("val")) for node in inputs_of(module.graph)]


def _lower(
    lowered: GraphModule,
    values: Sequence[Any],
    module: GraphModule,
    inputs: Sequence[Any],
    options: Options,
    graph_report: GraphReport,
) -> Compiled:
    """A graph through the inner compiler; `values` are what it is compiled for, `inputs` hold the parameters."""
    started = time.perf_counter()
    compiled = inner_compiler(options)(lowered, values)
    graph_report.inner_seconds = time.perf_counter() - started
    return for_each_model(compiled, module, inputs, options, graph_report) if graph_report.filled else compiled


def compile_chunk(
    module: GraphModule,
    options: Options,
    chunk: str | None,
    inputs: Sequence[Any],
    refusal: CannotFill | None = None,
) -> Chunk:
    """The graph of a piece of a prompt, compiled when it is called.

    Args:
        module: Dynamo's graph, with the fake values that it was traced on.
        options: the graph's.
        chunk: what is filled of the piece; None: nothing.
        inputs: the piece's own, of which the parameters are looked at.
        refusal: why nothing is filled, if something could be.
    """
    rows = next(prompt_rows(module))
    graph_report = GraphReport(route=options.route, tail=0, chunk=True, reason="a chunk in the prompt's tail")
    graph_report.rows = int(rows.node.hint) if isinstance(rows, torch.SymInt) else rows
    graph_report.dynamic = isinstance(rows, torch.SymInt)
    remember(parameters_of(inputs), graph_report)
    lowered = module
    try:
        if refusal is not None:
            raise refusal
        if chunk is not None and options.route != "exact":
            lowered = fill_graph(module, inputs, options, graph_report, chunk)
            graph_report.filled = True
            what = "before the prompt's tail" if chunk == WHOLE else "that holds exact rows, kept ones or the tail's"
            graph_report.reason = f"a chunk {what}, filled from layer {graph_report.split} on"
    except (OptionError, MapsError):
        raise
    except Exception as error:
        refuse(error, options, graph_report)
    values = fake_values(lowered)
    compiled = _lower(lowered, values, module, inputs, options, graph_report)
    if graph_report.filled:
        return Chunk(compiled, Sizes(lowered), lambda: graph_report.rows_filled)
    told: MutableMapping[torch.Tensor, set[str]] = WeakIdKeyDictionary()
    told.update({parameter: {graph_report.reason} for parameter in parameters_of(inputs)[:1]})

    def refused(another: CannotFill, given: Sequence[Any]) -> None:
        parameters = parameters_of(given)
        said = told.setdefault(parameters[0], set()) if parameters else set()
        if another.reason not in said:
            said.add(another.reason)
            remember(parameters, _exactly(graph_report, another))

    return Chunk(lambda *given: compiled(*given[: len(values)]), Sizes(module), refused=refused)


def parameters_of(inputs: Sequence[Any]) -> list[torch.nn.Parameter]:
    """The parameters among a graph's inputs."""
    return [x for x in inputs if isinstance(x, torch.nn.Parameter)]


def refuse(error: Exception, options: Options, graph_report: GraphReport) -> None:
    """Note why a graph runs exactly, and warn; under `strict`, raise it."""
    refusal = error if isinstance(error, CannotFill) else _bug(error)
    if options.strict:
        raise refusal from error
    graph_report.reason, graph_report.hint, graph_report.node = refusal.reason, refusal.hint, refusal.node
    _warn(graph_report, refusal)


def _warn(graph_report: GraphReport, refusal: CannotFill) -> None:
    what = "a chunk of a prompt" if graph_report.chunk else "prompt"
    warnings.warn(f"{what} runs exactly, not filled: {refusal}", RidgefillWarning, stacklevel=4)


def for_each_model(
    compiled: Compiled, module: GraphModule, example_inputs: Sequence[Any], options: Options, graph_report: GraphReport
) -> Compiled:
    """The compiled graph, which Dynamo also calls for other models of the same code, sizes and options.

    Weights are inputs of the graph. When others arrive, or they changed in place, the maps that were compiled in are
    held against them again: a model that the maps are not of runs the graph as it was handed over. So does every model
    once the maps' folder holds others: Dynamo takes equal options for the same backend and does not ask again.
    """
    places = [place for place, x in enumerate(example_inputs) if isinstance(x, torch.nn.Parameter)]
    maps = load_maps(options.maps) if options.maps is not None else None
    stamp = stamp_of(options.maps)
    sizes, rows, width = Sizes(module), next(prompt_rows(module)), len(inputs_of(module.graph))
    settled: list[tuple[Weights, bool]] = [(Weights([example_inputs[place] for place in places]), True)]

    def fits(inputs: Sequence[Any]) -> bool:
        parameters = [inputs[place] for place in places]
        for weights, known in settled:
            if weights.are(parameters):
                return known
        refusal = other_weights(options, maps, parameters)
        if refusal is not None and options.strict:
            raise refusal
        settled[:] = [(weights, known) for weights, known in settled if not weights.gone()]
        settled.insert(0, (Weights(parameters), refusal is None))
        remember(parameters, graph_report if refusal is None else _exactly(graph_report, refusal))
        return refusal is None

    def run(*inputs: Any) -> Any:
        if stamp_of(options.maps) != stamp:
            refusal = CannotFill(
                f"the maps in {options.maps} changed after this graph was compiled",
                hint="call torch._dynamo.reset(), then the model again",
            )
            if options.strict:
                raise refusal
            remember([inputs[place] for place in places], _exactly(graph_report, refusal))
            return module.forward(*inputs[:width])
        if not fits(inputs):
            return module.forward(*inputs[:width])
        if options.route != "lossless":
            given = len(inputs[width]) if len(inputs) > width else None  # exact rows of a chunk
            count = sizes.value(rows, inputs)
            kept = graph_report.kept_of(count) if given is None else given
            graph_report.rows_filled += count - (graph_report.tail or 0) - kept
        return compiled(*inputs)

    return run


class Weights:
    """A model's parameters as they were at one time, without keeping them alive."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.references = [weakref.ref(parameter) for parameter in parameters]
        self.versions = [_version(parameter) for parameter in parameters]

    def are(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether these are the same tensors, not written into since."""
        return all(
            reference() is parameter and version == _version(parameter)
            for reference, version, parameter in zip(self.references, self.versions, parameters, strict=True)
        )

    def gone(self) -> bool:
        """Whether the model they belong to is no more."""
        return any(reference() is None for reference in self.references)


def _version(parameter: torch.Tensor) -> int:
    return 0 if parameter.is_inference() else parameter._version


def _exactly(graph_report: GraphReport, refusal: CannotFill) -> GraphReport:
    """The report of a graph that another model's was compiled for, and the user's warning."""
    _warn(graph_report, refusal)
    return GraphReport(
        reason=refusal.reason,
        hint=refusal.hint,
        route=graph_report.route,
        rows=graph_report.rows,
        dynamic=graph_report.dynamic,
        chunk=graph_report.chunk,
    )


def warn_of_limit(graphs: int) -> None:
    """Say when Dynamo will compile no more of this model: what needs another graph then runs uncompiled, not filled."""
    limit = torch._dynamo.config.recompile_limit
    if graphs >= limit:
        warnings.warn(
            f"{graphs} graphs of this model are compiled, and torch._dynamo.config.recompile_limit is {limit}: calls "
            "that need another one will run uncompiled, not filled, and report() will not show them; raise the limit",
            RidgefillWarning,
            stacklevel=3,
        )


def inner_compiler(options: Options) -> Callable[[GraphModule, Sequence[Any]], Compiled]:
    """The compiler that lowers a graph: Inductor as `torch.compile` would call it, or one without code generation."""
    if options.inner == "eager":
        return lambda module, inputs: module.forward
    if options.inner == "aot_eager":
        from torch._dynamo.backends.debugging import aot_eager

        return lambda module, inputs: aot_eager(module, list(inputs))
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = list_mode_options(options.mode) if options.mode not in (None, "default") else {}
    return lambda module, inputs: cast(Compiled, compile_fx(module, list(inputs), config_patches=patches or None))


def graph_break(module: GraphModule) -> str | None:
    """Where and why Dynamo ended this graph before the model's end, if it did."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", False):
        return None
    frames = [f"{frame.filename}:{frame.lineno}" for frame in reason.user_stack[-1:]]
    return " at ".join([str(reason.reason).strip().splitlines()[0], *frames])
