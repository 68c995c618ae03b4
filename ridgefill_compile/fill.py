"""From a prefill graph to a filled one: runs the passes, after checking that maps, split and graph belong together."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch.fx import GraphModule, Node

from ridgefill_compile.capture import ARGUMENT, capture
from ridgefill_compile.cost import multiply_adds, values_of_sizes
from ridgefill_compile.errors import CannotFill, MapsError, describe_node
from ridgefill_compile.maps import RidgeMaps
from ridgefill_compile.options import Options
from ridgefill_compile.passes.attend import attend
from ridgefill_compile.passes.attention_states import attention_states
from ridgefill_compile.passes.calls import arguments, aten
from ridgefill_compile.passes.correct import Correction
from ridgefill_compile.passes.cuts import cuts_of, widths_of
from ridgefill_compile.passes.emit import inputs_of
from ridgefill_compile.passes.experts import expand
from ridgefill_compile.passes.locate import Located, locate
from ridgefill_compile.passes.lower import lower
from ridgefill_compile.passes.narrow import Narrowed, narrow
from ridgefill_compile.passes.outputs import check_late_states, check_wanted_rows
from ridgefill_compile.passes.route import Fill, route
from ridgefill_compile.passes.terminal_state import StateCorrection, late_scans
from ridgefill_compile.pieces import CORRECTED, LENGTHS, WHOLE, further_inputs
from ridgefill_compile.report import GraphReport
from ridgefill_compile.runner import PassRunner
from ridgefill_compile.selectors import Selector, parse_rows
from ridgefill_compile.splitmaps import INPUT

_captured: weakref.WeakKeyDictionary[GraphModule, GraphModule] = weakref.WeakKeyDictionary()

LEAST_GAIN = 1.02  # a fill that saves less than this share of multiply-adds is not worth its approximation


def fill_graph(
    module: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    graph_report: GraphReport,
    chunk: str | None = None,
) -> GraphModule:
    """Rewrite one of Dynamo's prefill graphs; fills in `graph_report`.

    `chunk`: what is filled of a piece of a prompt (see `pieces.py`); None: it is a whole prompt.

    Raises:
        CannotFill: the graph cannot be filled soundly, or nothing would be saved.
    """
    if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs):
        raise CannotFill("gradients are wanted", hint="call the model under torch.no_grad() or inference_mode()")
    run = PassRunner(options, graph_report.pass_seconds)
    captured = run("capture", lambda: captured_once(module))
    if options.route == "lossless":
        result = _drop_unread_rows(captured, run, graph_report, options)
        keep_input_sources(result, module)
        return result
    located = run("locate", lambda: locate(captured.graph))
    graph_report.layers = len(located.layers)
    correction = Correction(options.value_rescale, options.key_rescale, options.splice)
    fill = replace(choose_fill(located, options, example_inputs), correction=correction)
    if options.state_correction:
        fill = replace(fill, state_correction=state_correction(options, located, fill.split))
    graph_report.continues = continues(located)
    if chunk is None and not graph_report.continues:
        fill = replace(fill, first_rows=first_rows(options))
    if chunk is not None:
        fill = of_chunk(fill, chunk, options)
        graph_report.tail = fill.tail
    graph_report.split, graph_report.first_rows = fill.split, fill.first_rows
    run("check", lambda: _check(captured, located, fill))
    if fill.correction:
        told = fill.correction.told(attention_states(captured.graph, located, fill.split))
        graph_report.corrected, graph_report.uncorrected = told
    if fill.state_correction is not None:
        done, left = late_scans(located, fill.split).told()
        graph_report.corrected += done
        graph_report.uncorrected += left
    routed = run("route", lambda: route(captured, located, fill), before=captured)
    result = routed
    if options.eliminate:
        narrowed = narrow(routed, run)
        result = narrowed.result
        blocked = blocked_nodes(narrowed, located)
        graph_report.blocked = [describe_node(node) for node in blocked]
    run("cost", lambda: _count(graph_report, captured, result, fill.selectors))
    _count_layers(graph_report, located)
    result = run("attend", lambda: attend(result), before=result)
    result = lowered(expand(result), run, options)
    if chunk is None and options.eliminate and options.route != "oracle" and options.splice is None:
        check_gain(graph_report, blocked)
    keep_input_sources(result, module)
    return result


def captured_once(module: GraphModule) -> GraphModule:
    """The captured graph of one of Dynamo's, which each kind of chunk has a rewritten copy of."""
    if module not in _captured:
        _captured[module] = capture(module)
    return _captured[module]


def continues(located: Located) -> bool:
    """Whether states join those of earlier rows, which come in with the cache."""
    for layer in located.layers:
        for state in layer.states:
            for join in (state, *state.users):
                tensors = arguments(join)["tensors"] if join.target is aten.cat.default else ()
                if any(tensor.op == "placeholder" for tensor in tensors):
                    return True
    return False


def of_chunk(fill: Fill, chunk: str, options: Options) -> Fill:
    """The fill of a piece of a prompt: corrections are made once, where the prompt's tail begins.

    Raises:
        CannotFill: an option that needs the whole prompt.
    """
    if fill.correction.splice is not None:
        raise CannotFill(
            "a prompt in pieces cannot have states spliced: a chunk before the tail has no exact ones",
            hint="run the prompt at once, or without the option 'splice'",
        )
    if fill.route == "oracle":
        raise CannotFill(
            "a prompt in pieces cannot be filled with true layer inputs: a chunk before the tail has none",
            hint="run the prompt at once, or by another route",
        )
    fill = replace(fill, selectors=())  # they have chosen: which rows stay exact is an input of the chunk's graph
    if chunk not in CORRECTED:
        fill = replace(fill, correction=Correction())
    if chunk not in CORRECTED or chunk == LENGTHS:
        fill = replace(fill, state_correction=None)
    if chunk == WHOLE:
        return replace(fill, tail=0)
    return replace(fill, tail=1, given=further_inputs(options, chunk))


def _drop_unread_rows(
    captured: GraphModule, run: PassRunner, graph_report: GraphReport, options: Options
) -> GraphModule:
    """Route "lossless": nothing is predicted. What no output needs, the last layer's queries and MLP on most rows first
    of all, is not computed.

    Raises:
        CannotFill: every row is needed.
    """
    result = narrow(captured, run).result
    run("cost", lambda: _count(graph_report, captured, result))
    gain = graph_report.ceiling_multiply_adds
    if gain is None or gain <= 1.0:
        raise CannotFill(
            "no rows can be dropped: every one is read",
            hint="pass logits_to_keep=k, and no labels or output_hidden_states",
        )
    return lowered(expand(result), run, options)


def lowered(module: GraphModule, run: PassRunner, options: Options) -> GraphModule:
    """The graph as its inner compiler likes it best."""
    return run("lower", lambda: lower(module), before=module) if options.inner == "inductor" else module


def _check(captured: GraphModule, located: Located, fill: Fill) -> None:
    if fill.tail > 0 or located.others:
        check_wanted_rows(captured.graph, located, fill.tail)
    check_late_states(captured.graph, located, fill.split, fill.tail)


def choose_fill(located: Located, options: Options, example_inputs: Sequence[Any]) -> Fill:
    """Split, tail, route and maps for this graph.

    Raises:
        CannotFill: the graph is only a part of the model, the maps are of another model, or no layer is late.
        MapsError: the maps hold no such split, or cannot be read.
    """
    layers = len(located.layers)
    maps = load_maps(options.maps) if options.maps is not None else None
    split = options.split if options.split is not None else maps.split if maps is not None else layers
    tokens = maps.tokens.tensors() if maps is not None and maps.tokens is not None else None
    if maps is not None and options.route == "ridge":
        maps = maps.at(split)
        check_maps(maps, located, options, [x for x in example_inputs if isinstance(x, torch.nn.Parameter)])
        selectors, stream = parse_rows(options.rows), options.stream_maps
        return Fill("ridge", split, options.tail, maps, selectors, tokens=tokens, cut=maps.cut, stream_maps=stream)
    if located.tokens.op == "placeholder" and "inputs_embeds" not in located.tokens.meta.get(ARGUMENT, ""):
        raise CannotFill(
            "the graph begins in the middle of the model, so its layers cannot be numbered",
            located.tokens,
            "remove what breaks the graph (see TORCH_LOGS=graph_breaks)",
        )
    if split >= layers:
        raise CannotFill(
            f"split {split} leaves no late layer: {layers} layers were found that write states",
            hint=f"choose a split below {layers}; if the model has more, something leads around its residual stream",
        )
    cut = maps.cut if maps is not None and options.route == "oracle" else INPUT
    return Fill(options.route, split, options.tail, selectors=parse_rows(options.rows), tokens=tokens, cut=cut)


def first_rows(options: Options) -> int:
    """How many rows that begin a sequence stay exact: as the options say, else as the maps that predict rows do."""
    if options.first_rows is not None:
        return options.first_rows
    if options.maps is None or options.route not in ("ridge", "identity"):
        return 0
    maps = load_maps(options.maps)
    split = maps.split if options.split is None else options.split
    return min(maps.at(split).first_rows, options.min_fill) if split in maps.splits else 0


def check_maps(maps: RidgeMaps, located: Located, options: Options, parameters: list[torch.Tensor]) -> None:
    """Whether these maps were made for this model.

    Raises:
        CannotFill: other layers, other widths, projections that a layer has not, or (unless `check_weights=False`)
            other weights.
    """
    layers = len(located.layers)
    wanted = tuple(range(maps.split + 1, layers))
    if tuple(maps.layers) != wanted:
        have = max(maps.layers, default=maps.split) + 1
        raise CannotFill(
            f"the maps are for {have} layers and this graph holds {layers}",
            hint="the maps are of another model, or a graph break cut this one (see TORCH_LOGS=graph_breaks)",
        )
    source = located.layers[maps.split].width
    for layer, widths in widths_of(cuts_of(located, maps.split, maps.cut)).items():
        expected = (sum(widths), source)
        if maps.shape(layer) != expected or maps.widths(layer) != widths:
            raise CannotFill(
                f"the map of layer {layer} is {maps.shape(layer)}, and the model needs {expected}{_told(widths)}",
                located.layers[layer].input,
                "calibrate maps for this model",
            )
    refusal = other_weights(options, maps, parameters)
    if refusal is not None:
        raise refusal


def _told(widths: tuple[int, ...]) -> str:
    return f", for projections of widths {', '.join(map(str, widths))}" if len(widths) > 1 else ""


def state_correction(options: Options, located: Located, split: int) -> StateCorrection:
    """What the maps say of the states that late recurrences end the prefix with.

    Raises:
        CannotFill: a state has another shape.
        MapsError: the maps do not say it of every such layer.
    """
    maps = load_maps(options.maps).at(split)
    scans = late_scans(located, split)
    differences = {}
    for layer in scans.found:
        difference = maps.state_difference(layer)
        if difference is None:
            raise MapsError(
                f"option 'state_correction' needs the mean difference of layer {layer}'s state, and the maps of split "
                f"{split} hold none: run ridgefill_compile.calibrate_states(model, maps, texts) and save what it gives"
            )
        if tuple(difference.shape) != scans.shape(layer):
            raise CannotFill(
                f"the state difference of layer {layer} is {list(difference.shape)}, and the model's state "
                f"{list(scans.shape(layer))}",
                scans.found[layer],
                "calibrate the states of this model",
            )
        differences[layer] = difference
    return StateCorrection(float(options.state_correction), differences)


def other_weights(options: Options, maps: RidgeMaps | None, parameters: list[torch.Tensor]) -> CannotFill | None:
    """What to say of a model that the maps of a ridge route were not calibrated on; None of one that they were."""
    if options.route != "ridge" or not options.check_weights or maps is None:
        return None
    if maps.matches(parameters) == "same":
        return None
    return CannotFill(
        "the maps were calibrated on other weights",
        hint="calibrate maps for this model, or pass check_weights=False to fill a close relative with them",
    )


def load_maps(source: Any) -> RidgeMaps:
    """Maps as given, or from their directory; a directory is read again only when it changes."""
    if isinstance(source, RidgeMaps):
        return source
    return _load_maps(str(source), stamp_of(source))


def stamp_of(source: Any) -> tuple[int, int] | None:
    """What changes when other maps are saved in the same directory."""
    if source is None or isinstance(source, RidgeMaps):
        return None
    try:
        found = (Path(source) / "manifest.json").stat()
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_ino)


@functools.lru_cache(maxsize=8)
def _load_maps(source: str, stamp: tuple[int, int] | None) -> RidgeMaps:
    return RidgeMaps.from_pretrained(source)


def blocked_nodes(narrowed: Narrowed, located: Located) -> list[Node]:
    """Nodes that work on the prompt and run on all its rows, though only some are read: their op has no rule."""
    graph = narrowed.whole.graph
    flow = {next(node for node in graph.nodes if node.name == located.tokens.name)}
    for node in graph.nodes:
        if any(operand in flow for operand in node.all_input_nodes):
            flow.add(node)
    return [node for node in reversed(narrowed.demands.blocked) if node in flow]


def check_gain(graph_report: GraphReport, blocked: list[Node]) -> None:
    """Whether the fill saves anything.

    Raises:
        CannotFill: it does not, naming the first op that needed every row.
    """
    gain = graph_report.ceiling_multiply_adds
    if gain is not None and gain < LEAST_GAIN:
        raise CannotFill(
            f"filling would save nothing (multiply-adds {gain:.2f}x)",
            blocked[0] if blocked else None,
            "an op of the late layers needs every row: it has no row rule"
            if blocked
            else "lower the split or the tail",
        )


def keep_input_sources(result: GraphModule, module: GraphModule) -> None:
    """Hand on what Dynamo knows of its graph's inputs: Inductor reads off it which of them keep their address."""
    sources = {}
    known = [getattr(node, "_dynamo_source", None) for node in inputs_of(module.graph)]
    for place, node in enumerate(inputs_of(result.graph)):
        source = known[place] if place < len(known) else ConstantSource(node.name)  # what a chunk is told beside them
        if source is not None:
            node._dynamo_source = source
    for name, _ in [*result.named_parameters(), *result.named_buffers()]:
        sources[name] = ConstantSource(name)
    result._param_name_to_source = sources  # type: ignore[assignment]
    result.meta = dict(module.meta)


def _count(
    graph_report: GraphReport, captured: GraphModule, result: GraphModule, selectors: Sequence[Selector] = ()
) -> None:
    """Selected rows, and multiply-adds before and after, as formulas and at the traced sizes."""
    exact, filled = multiply_adds(captured.graph), multiply_adds(result.graph)
    graph_report.share = sum(selector.share for selector in selectors)
    if graph_report.rows is not None:
        graph_report.kept = graph_report.kept_of(graph_report.rows)
    sizes = values_of_sizes(result.graph)
    graph_report.formulas, graph_report.sizes = (exact, filled), sizes
    graph_report.multiply_adds_exact = int(exact.subs(sizes))
    graph_report.multiply_adds_filled = int(filled.subs(sizes))
    graph_report.ceiling_multiply_adds = graph_report.multiply_adds_exact / graph_report.multiply_adds_filled


def _count_layers(graph_report: GraphReport, located: Located) -> None:
    """The ceiling by layer passes."""
    rows = located.rows
    if isinstance(rows, torch.SymInt):
        graph_report.row_symbol = rows.node.expr
    assert graph_report.rows is not None
    graph_report.ceiling_layer_passes = graph_report.layer_passes(graph_report.rows)
