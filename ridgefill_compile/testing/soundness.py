"""What must be equal: a decoder's fill in several forms, and a graph before and after any rewrite."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from ridgefill_compile.errors import CannotFill
from ridgefill_compile.passes.calls import shape
from ridgefill_compile.passes.emit import copy_module, inputs_of
from ridgefill_compile.passes.rows import EVERYTHING, Rows
from ridgefill_compile.passes.verify import results_of
from ridgefill_compile.selectors import parse_rows
from ridgefill_compile.testing import source
from ridgefill_compile.testing.difference import CLOSE, Difference, Mismatch, demanded_rows, first_difference
from ridgefill_compile.testing.graphs import aten, traced_call
from ridgefill_compile.testing.square import number
from ridgefill_compile.testing.variants import Variants
from ridgefill_compile.zoo.calling import worst

Rewrite = Callable[[GraphModule], GraphModule | None]


# ---------------------------------------------------------------- a decoder's fill


def assert_rows_sound(
    model: nn.Module,
    inputs: Mapping[str, Any] | Tensor,
    split: int = 1,
    tail: int = 1,
    *,
    route: str = "ridge",
    rows: Any = None,
    first_rows: int = 0,
    tolerance: float = CLOSE,
    must_fill: bool = False,
) -> str | None:
    """A fill of this prompt is sound: every graph that its passes make answers as the one before.

        oracle == exact         with true layer inputs, logits and every state write are the model's own
        eliminated == routed    computing fewer rows changes nothing, whatever the maps (here: random ones)

    Args:
        model: a decoder that returns logits of at most the last `tail` rows and its states: any module whose output
            is made of tensors, or a model of transformers (which takes longer: Dynamo traces it).
        inputs: arguments of the call, by name, or its first one. `use_cache=True` and `logits_to_keep=1` are added
            where the model has such arguments.
        split: first late layer.
        tail: exact tail rows, fewer than the prompt has.
        route: what prefix rows of late layers read.
        rows: what selects prefix rows that stay exact: text or selectors (see the option of that name).
        first_rows: how many rows that begin a sequence stay so, too.
        tolerance: largest difference that is none, relative to a result's largest entry.
        must_fill: a refusal fails, too.

    Returns:
        Why the prompt would not be filled, if so (then it is answered exactly); None if it is.

    Raises:
        Mismatch: an AssertionError that shows the first node that differs, and code that fails the same way.
    """
    call = _call_of(model, inputs)
    selectors = parse_rows(rows)
    variants = Variants(split=split, tail=tail, ways=_ways(route), selectors=selectors, first_rows=first_rows)
    given = {"split": split, "tail": tail, "route": route, "rows": rows, "first_rows": first_rows}
    given |= {"tolerance": tolerance, "must_fill": must_fill}
    shown = source.settings(given, {"route": "ridge", "first_rows": 0, "tolerance": CLOSE, "must_fill": False})
    lines = [] if isinstance(rows, str) else [source.of_function(type(each), type(each).__name__) for each in selectors]
    lines += [*source.of_model(model), *source.of_call(call), f"assert_rows_sound(model, call{shown})"]
    code = source.program(["assert_rows_sound"], lines)
    try:
        found = _answers(model, call, variants)
    except CannotFill as refusal:
        if must_fill:
            raise Mismatch(f"not filled: {refusal}", code) from None
        return str(refusal)
    for left, right in (("exact", "oracle"), ("routed", "eliminated")):
        gap = worst(found[left], found[right])
        if not gap < tolerance:
            what = f"rows are not sound: {right} != {left} (by {gap:.2g})"
            raise Mismatch(what, code, _where(variants, right, tolerance))
    return None


def _ways(route: str) -> dict[str, tuple[str, bool]]:
    return {"oracle": ("oracle", True), "routed": (route, False), "eliminated": (route, True)}


def _call_of(model: nn.Module, inputs: Mapping[str, Any] | Tensor) -> dict[str, Any]:
    parameters = list(inspect.signature(model.forward).parameters)
    call: dict[str, Any] = {parameters[0]: inputs} if isinstance(inputs, Tensor) else dict(inputs)
    for name, value in (("use_cache", True), ("logits_to_keep", 1)):
        if name in parameters:
            call.setdefault(name, value)
    return call


def _answers(model: nn.Module, call: Mapping[str, Any], variants: Variants) -> Mapping[str, Sequence[Tensor]]:
    """Results in every way; without Dynamo where the output is made of tensors.

    Raises:
        CannotFill: the prompt would not be filled.
    """
    with torch.no_grad():
        output = None if isinstance(model, PreTrainedModel) else model(**call)
    if output is None or not all(isinstance(leaf, Tensor | int | float | None) for leaf in tree_leaves(output)):
        results = variants.run(model, call)
        if variants.refusals or not results:
            raise variants.refusals[0] if variants.refusals else CannotFill("no prompt longer than the tail was traced")
        return results[-1]
    module, inputs = traced_call(model, call)
    graphs = variants.rewritten(module)
    found = variants.answer(graphs, inputs)
    own = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    assert worst(own, found["exact"][: len(own)]) < CLOSE, "the traced graph is not the model: does it draw at random?"
    return found


def _where(variants: Variants, name: str, tolerance: float) -> Difference | None:
    """The first node that differs, of the pass that changed something."""
    routed, narrowed = variants.routed[name], variants.narrowed[name]
    found = first_difference(routed, narrowed, variants.inputs, tolerance=tolerance)
    if found is None and name == "oracle":
        assert variants.captured is not None
        found = first_difference(variants.captured, routed, variants.inputs, tolerance=tolerance)
    return found


# ---------------------------------------------------------------- any rewrite


def assert_same_on_demanded_rows(
    before: GraphModule,
    after: GraphModule | Rewrite,
    inputs: Sequence[Any] | None = None,
    *,
    demanded: Mapping[int, Rows] | None = None,
    tolerance: float = CLOSE,
    seed: int = 0,
) -> None:
    """Two graphs give the same results, on the rows of them that anyone reads.

    Args:
        before: graph with (fake) values in `meta["val"]`, as `traced` and `traced_call` leave it.
        after: its rewrite; or the function that rewrites it, which is given a copy and may change that, or return
            another.
        inputs: of both; None: random ones of the shapes and types that the graph was traced with, with integers that
            lie within what they index.
        demanded: rows that are read, for results of which not all are, by their number. `after` may return these
            alone.
        tolerance: largest difference that is none, relative to a result's largest entry.
        seed: of random inputs.

    Raises:
        Mismatch: an AssertionError that shows the first node that differs, and code that fails the same way.
    """
    rewrite = None if isinstance(after, GraphModule) else after
    rewritten = after if isinstance(after, GraphModule) else _rewritten(before, after)
    given = list(inputs) if inputs is not None else random_inputs(before, seed)
    rows = [(demanded or {}).get(index, EVERYTHING) for index in range(len(results_of(before)) + len(given))]
    found: Difference | None = None
    left = [demanded_rows(value, wanted) for value, wanted in zip(_run(before, given), rows, strict=False)]
    try:
        right = [demanded_rows(value, wanted) for value, wanted in zip(_run(rewritten, given), rows, strict=False)]
    except Exception as error:  # whatever a broken graph may raise
        what = f"the rewritten graph does not run: {str(error).splitlines()[0]}"
    else:
        gap = worst(left, right)
        if gap < tolerance:
            return
        what = f"the graphs differ (by {gap:.2g})"
        found = first_difference(before, rewritten, given, demanded=demanded, tolerance=tolerance)
    shown = source.settings({"tolerance": tolerance, "seed": seed}, {"tolerance": CLOSE, "seed": 0})
    shown = (", inputs" if inputs is not None else "") + _rows_shown(demanded) + shown
    lines = source.kept(before) or ["before, inputs = ...  # the graph as you traced it, and its inputs"]
    lines = [*lines, source.of_function(rewrite, "rewrite") if rewrite else "rewrite = ...  # what made `after`"]
    lines += ["from ridgefill_compile.passes.rows import Rows"] if demanded else []
    lines += [f"assert_same_on_demanded_rows(before, rewrite{shown})"]
    names = ["assert_same_on_demanded_rows", *(["traced_call"] if source.kept(before) else [])]
    raise Mismatch(what, source.program(names, lines), found)


def _rows_shown(demanded: Mapping[int, Rows] | None) -> str:
    shown = [f"{i}: Rows({r.dim}, {r.last}, {number(r.blocks)})" for i, r in (demanded or {}).items()]
    return f", demanded={{{', '.join(shown)}}}" if shown else ""


def _rewritten(before: GraphModule, rewrite: Rewrite) -> GraphModule:
    copy = copy_module(before)
    result = rewrite(copy) or copy
    result.graph.lint()
    result.recompile()
    return result


def _run(module: GraphModule, inputs: Sequence[Any]) -> list[Tensor]:
    """Tensor results, and behind them the inputs as the graph leaves them."""
    copies = [x.clone() if isinstance(x, Tensor) else x for x in inputs]
    with torch.no_grad():
        results = tree_leaves(module(*copies))
    count = len(results_of(module))
    return [x for x in [*results[:count], *copies] if isinstance(x, Tensor)]


def random_inputs(module: GraphModule, seed: int = 0) -> list[Any]:
    """Inputs of the shapes and types that a graph was traced with, with integers that lie within what they index."""
    generator = torch.Generator().manual_seed(seed)
    return [_random(node, generator) for node in inputs_of(module.graph)]


def _random(node: Node, generator: torch.Generator) -> Any:
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return number(value)
    size = [number(length) for length in value.shape]
    if value.dtype == torch.bool:
        return torch.rand(size, generator=generator) < 0.5
    if not value.is_floating_point():
        return torch.randint(_bound(node), size, generator=generator, dtype=value.dtype)
    scale = size[-1] ** -0.5 if len(size) == 2 else 1.0  # a matrix, maybe: its products stay of size 1
    return (torch.randn(size, generator=generator) * scale).to(value.dtype)


def _bound(node: Node) -> int:
    """What integers must lie below: they are looked up with, here or behind casts and views."""
    bounds: list[int] = []
    ahead, seen = [node], {node}
    while ahead:
        value = ahead.pop()
        for reader in value.users:
            if reader.target is aten.embedding.default and reader.args[1] is value:
                table = reader.args[0]
                assert isinstance(table, Node)
                bounds.append(number(shape(table)[0]))
            elif reader.target in (aten.index_select.default, aten.gather.default):
                source_node, dim = reader.args[0], reader.args[1]
                assert isinstance(source_node, Node) and isinstance(dim, int)
                bounds.append(number(shape(source_node)[dim]))
            elif reader not in seen and reader.all_input_nodes == [value]:
                seen.add(reader)
                ahead.append(reader)
    return min(bounds, default=4)
