"""What the compiler sees in a model: layers, state writes, and the rows each value is computed on. Runs nothing.

The model may lie on the meta device, without weights: it is traced, analysed and rewritten, and never called.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node

from ridgefill_compile.apart import compile_apart
from ridgefill_compile.capture import capture
from ridgefill_compile.cost import layer_pass_ceiling, multiply_adds, values_of_sizes
from ridgefill_compile.errors import CannotFill, OptionError, RidgefillError, describe_node
from ridgefill_compile.fill import blocked_nodes
from ridgefill_compile.passes.calls import aten, shape
from ridgefill_compile.passes.demand import analyse
from ridgefill_compile.passes.emit import fake_mode_of
from ridgefill_compile.passes.locate import Layer, Located, locate
from ridgefill_compile.passes.narrow import Narrowed, narrow
from ridgefill_compile.passes.outputs import check_late_states, check_wanted_rows, counts_rows
from ridgefill_compile.passes.route import Fill, route
from ridgefill_compile.passes.rows import EVERYTHING, NOTHING, Demand, Rows
from ridgefill_compile.recurrences.substitute import substitute_recurrences


@dataclass(frozen=True)
class LayerFacts:
    """One located layer: where it is, what it is, what it writes, and what a map would predict for it."""

    index: int
    module: str
    kind: str
    late: bool
    width: int
    input: str
    states: list[str]


@dataclass(frozen=True)
class ValueFacts:
    """One value of a late layer of the filled graph, and the rows it is computed on: "all", "last k" or "none"."""

    name: str
    op: str
    module: str
    shape: list[str]
    rows: str
    reads: list[str]


ROWS, TAIL = 4096, 512  # of the prompt that is traced, if nothing else is said


@dataclass
class Inspection:
    """Result of `inspect_model`; `reason` says why the model would not be filled, or is empty."""

    rows: int
    tail: int
    split: int
    layers: list[LayerFacts] = field(default_factory=list)
    late_layer: int | None = None
    values: list[ValueFacts] = field(default_factory=list)
    multiply_adds_exact: int | None = None
    multiply_adds_filled: int | None = None
    ceiling_multiply_adds: float | None = None
    ceiling_layer_passes: float | None = None
    blocked: list[str] = field(default_factory=list)
    reason: str = ""
    node: str | None = None
    hint: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, for JSON."""
        return asdict(self)


def rows_to_inspect(model: nn.Module) -> int:
    """4,096 rows, or as many as the model has positions for, if its configuration says how many."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    positions = getattr(text, "max_position_embeddings", None)
    return min(ROWS, positions) if isinstance(positions, int) and positions > 1 else ROWS


def inspect_model(
    model: nn.Module, *, rows: int | None = None, tail: int | None = None, split: int | None = None
) -> Inspection:
    """Trace a model's prefill of `rows` rows and analyse it, without running it.

    Args:
        model: a causal decoder, on any device; the meta device will do.
        rows: prompt rows; `rows_to_inspect` if not given.
        tail: exact tail rows, fewer than `rows`; 512, or half of the rows if these are fewer, if not given.
        split: first late layer; half of the layers if not given.

    Raises:
        OptionError: rows, tail or split out of range.
        RidgefillError: no prefill graph could be traced.
    """
    rows = rows_to_inspect(model) if rows is None else rows
    tail = min(TAIL, rows // 2) if tail is None else tail
    if not 1 <= tail < rows:
        raise OptionError(f"the tail must be at least 1 row and shorter than the prompt: tail {tail}, rows {rows}")
    found: list[Inspection] = []
    parameter = next(model.parameters(), None)
    device = parameter.device if parameter is not None else torch.device("cpu")
    if device.type == "meta":
        model = copy.deepcopy(model)  # costs nothing, and the caller's stays on the meta device
    substitute_recurrences(model)
    compiled = compile_apart(model, _backend(found, rows, tail, split), dynamic=False)
    with contextlib.ExitStack() as context:
        context.enter_context(torch.no_grad())
        context.enter_context(contextlib.suppress(_Seen))
        if device.type == "meta":  # Dynamo cannot mix constants with meta tensors; with fake ones it can
            context.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            model.to_empty(device="cpu")
            device = torch.device("cpu")
        try:
            compiled(torch.ones(1, rows, dtype=torch.int64, device=device), use_cache=True, logits_to_keep=1)
        except (_Seen, RidgefillError):
            raise
        except Exception as error:  # a model's own code may raise anything
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise RidgefillError(
                f"a prompt of {rows} rows cannot be traced: {type(error).__name__}: {' '.join(lines[:2])} | is it a "
                "causal decoder that takes as many rows?"
            ) from error
    if not found:
        raise RidgefillError("the model was not traced: torch.compile is switched off, or its forward breaks at once")
    if isinstance(found[0], OptionError):
        raise found[0]
    return found[0]


class _Seen(Exception):  # no error: it ends the call before the model runs
    pass


def _backend(found: list[Any], rows: int, tail: int, split: int | None) -> Callable[..., Any]:
    def backend(module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        inspection = Inspection(rows=rows, tail=tail, split=-1 if split is None else split)
        try:
            _inspect(inspection, module, split)
        except CannotFill as refusal:
            inspection.reason, inspection.node, inspection.hint = refusal.reason, refusal.node, refusal.hint
        except OptionError as error:
            found.append(error)
        found.append(inspection)

        def stop(*inputs: Any) -> Any:
            raise _Seen

        return stop

    return backend


def _inspect(inspection: Inspection, module: GraphModule, split: int | None) -> None:
    captured = capture(module)
    located = locate(captured.graph)
    layers = len(located.layers)
    inspection.split = layers // 2 if split is None else split
    if not 0 <= inspection.split < layers:
        raise OptionError(f"the split must lie in 0..{layers - 1}: {layers} layers write states")
    inspection.layers = [_layer_facts(captured, located, layer, inspection.split) for layer in located.layers]
    fill = Fill("ridge", inspection.split, inspection.tail, ShapeOnlyMaps(captured, located, inspection.split))
    check_wanted_rows(captured.graph, located, fill.tail)
    check_late_states(captured.graph, located, fill.split, fill.tail)
    narrowed = narrow(route(captured, located, fill))
    inspection.blocked = [describe_node(node) for node in blocked_nodes(narrowed, located)]
    sizes = values_of_sizes(captured.graph)
    exact, filled = (int(multiply_adds(graph).subs(sizes)) for graph in (captured.graph, narrowed.result.graph))
    inspection.multiply_adds_exact, inspection.multiply_adds_filled = exact, filled
    inspection.ceiling_multiply_adds = exact / filled
    inspection.ceiling_layer_passes = layer_pass_ceiling(fill.split, layers, inspection.rows, fill.tail)
    inspection.late_layer = min(fill.split + 1, layers - 1)
    inspection.values = _values(narrowed, located, inspection.late_layer)


class ShapeOnlyMaps:
    """Maps without numbers, to rewrite a graph that will not run."""

    norm: float | None = None

    def __init__(self, module: GraphModule, located: Located, split: int) -> None:
        self.mode = fake_mode_of(module.graph)
        self.widths = {layer.index: layer.width for layer in located.layers}
        self.d_in = located.layers[split].width

    def matrix(self, layer: int) -> Tensor:
        """[d_out, d_in], a fake tensor."""
        with self.mode:
            return torch.empty(self.widths[layer], self.d_in)

    def codes(self, layer: int) -> None:
        """They are not stored."""

    def offset(self, layer: int) -> Tensor:
        """[d_out], a fake tensor."""
        with self.mode:
            return torch.empty(self.widths[layer])


def _layer_facts(module: GraphModule, located: Located, layer: Layer, split: int) -> LayerFacts:
    try:
        one = Located(located.tokens, located.row_dim, (layer,), located.trunk, located.result, located.others)
        check_late_states(module.graph, one, 0)
        kind = _kind(module, located, layer)
    except CannotFill:
        kind = "unknown"
    return LayerFacts(
        index=layer.index,
        module=module_of(layer.states[0]),
        kind=kind,
        late=layer.index >= split,
        width=layer.width,
        input=f"{layer.input.name} {_shape(layer.input)}",
        states=[f"{state.name} {_shape(state)}" for state in layer.states],
    )


def _kind(module: GraphModule, located: Located, layer: Layer) -> str:
    """What a layer's states are for: attention by what reads them, a recurrence or convolution by what they hold."""
    kinds = []
    for state in layer.states:
        if any(counts_rows(size, located.rows) for size in shape(state)):
            kinds.append(_kind_of_rows(state))
        else:
            read = analyse(module.graph, [(state, EVERYTHING)], stop=layer.input).on(layer.input)
            kinds.append("convolution" if isinstance(read, Rows) else "recurrence")
    if "recurrence" in kinds:  # its convolution is part of it
        kinds = [kind for kind in kinds if kind != "convolution"]
    found = sorted(set(kinds) - {"row by row"})
    return " and ".join(found) or "row by row"


def _kind_of_rows(state: Node) -> str:
    """Attention, by what reads a state, or plainly that each row writes its own."""
    seen: set[Node] = set()
    ahead = [state]
    while ahead:
        node = ahead.pop()
        if node.target is aten.scaled_dot_product_attention.default:
            return "attention"
        if node.target is aten.softmax.int:
            return "attention (spelt out)"
        for reader in node.users:
            if reader not in seen and len(seen) < 200:
                seen.add(reader)
                ahead.insert(0, reader)
    return "row by row"


def module_of(node: Node) -> str:
    """Qualified name of the module a node was traced in, without Dynamo's prefix."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    name = str(stack[-1][0]) if stack else ""
    return name.split("].", 1)[-1] if name.startswith("L[") else name


def _values(narrowed: Narrowed, located: Located, layer: int) -> list[ValueFacts]:
    """The values of one late layer that depend on the prompt, in order."""
    nodes = narrowed.whole.graph.nodes
    by_name = {node.name: node for node in nodes}
    first = by_name[located.layers[layer].input.name]
    later = located.layers[layer + 1].input if layer + 1 < len(located.layers) else located.trunk[-1]
    last = by_name[later.name]
    mine = {first}
    for node in nodes:
        if first < node <= last and any(operand in mine for operand in node.all_input_nodes):
            mine.add(node)
    return [
        ValueFacts(
            name=node.name,
            op=str(node.target).removesuffix(".default"),
            module=module_of(node),
            shape=[str(size) for size in node.meta["val"].shape],
            rows=_rows(narrowed.demands.on(node)),
            reads=[operand.name for operand in node.all_input_nodes if operand in mine],
        )
        for node in sorted(mine)
        if isinstance(node.meta.get("val"), Tensor)
    ]


def _rows(demand: Demand) -> str:
    if demand is NOTHING:
        return "none"
    if demand is EVERYTHING:
        return "all"
    assert isinstance(demand, Rows)
    return f"last {demand.last}"


def _shape(node: Node) -> str:
    return f"[{', '.join(str(size) for size in node.meta['val'].shape)}]"
