"""Whether a decoder is filled soundly and fully: what is checked, of any model.

Each call is traced once and rewritten in several ways, which run side by side on the same inputs (`Variants`):

    oracle == exact           with true layer inputs, tail logits and every state write are the exact model's
    eliminated == routed      computing fewer rows changes nothing, whatever the maps (here: random ones)
    cost <= closed form       no more multiply-adds than `closed_form` allows, which knows no row rules

for one length, for lengths that change, for a batch padded on the left, and for a continued cache. A model that is
refused for a reason and answers exactly is sound, but not filled.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from ridgefill_compile.cost import multiply_adds
from ridgefill_compile.fill import LEAST_GAIN, blocked_nodes
from ridgefill_compile.options import Options
from ridgefill_compile.passes.calls import Need, shape
from ridgefill_compile.passes.demand import Demands, analyse
from ridgefill_compile.passes.emit import copy_module
from ridgefill_compile.passes.narrow import Narrowed
from ridgefill_compile.passes.rows import EVERYTHING
from ridgefill_compile.passes.verify import verify
from ridgefill_compile.plan import plan
from ridgefill_compile.recurrences.substitute import substitute_recurrences
from ridgefill_compile.testing.difference import values_of
from ridgefill_compile.testing.variants import Variants
from ridgefill_compile.zoo.calling import Caller, logits_of, worst
from ridgefill_compile.zoo.closed_form import closed_form

SPLIT, TAIL, KEPT = 1, 16, 2
ROWS = (61, 47, 73)  # of prompts: primes, so that a size that counts rows is known by it
TOLERANCE = {torch.float32: 2e-4, torch.float64: 1e-8}  # fp32 rounding of these models is up to 2e-5
FEWER_BREAKS = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
MOST_BLOCKED = 6  # nodes named
MOST_IN_DOUBLE = 10_000_000  # parameters


@dataclass
class Verdict:
    """What was found of one model.

    Attributes:
        type: model type, or what the model was called.
        built: whether it could be built and called at all.
        graphs: how many graphs Dynamo makes of one prompt.
        sound: no check failed: filled and right, or refused and exact.
        filled: whether prompts are filled.
        eliminated: whether the filled graph costs no more than the closed form; None where that cannot be told.
        layer_count: layers that write states.
        filled_layers: of these, how many are late in the check and filled.
        gain: multiply-adds exact over filled, at the sizes of the check.
        blocked_by: ops of late layers that run on more rows than are read, with the first node of each.
        reason: why it is not filled, or what failed.
        calls: outcome of each kind of call: "ok", "ok, but ..", "skipped: ..", "refused: .." or "failed: ..".
        notes: what to know beside.
        quick: whether only prompts of one length and of changing lengths were checked.
        dtype: of the weights; "none" if there are none.
        seconds: that all this took.
    """

    type: str
    built: bool = False
    graphs: int = 0
    sound: bool = False
    filled: bool = False
    eliminated: bool | None = None
    layer_count: int = 0
    filled_layers: int = 0
    gain: float | None = None
    blocked_by: list[str] = field(default_factory=list)
    reason: str = ""
    calls: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    quick: bool = False
    dtype: str = "float32"
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, for JSON."""
        return asdict(self)


@dataclass(repr=False)
class _Traced(Variants):
    """Variants of one model, with what the first filled graph tells of its cost."""

    verified: bool = False
    kept: int = KEPT
    graphs_seen: int = 0
    graphs_of_first_call: int = 0
    plans: list[str] = field(default_factory=list)
    cost: _Cost | None = None

    def __call__(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs_seen += 1
        planned = plan(module, Options(route="oracle", split=self.split, tail=self.tail, min_fill=1))
        if not planned.fill:
            self.plans.append(planned.reason)
        return super().__call__(module, example_inputs)

    def rewrite(self, module: GraphModule) -> dict[str, GraphModule]:
        graphs = super().rewrite(module)
        if self.compiled == 1:
            verify(self.narrowed["eliminated"], self.routed["eliminated"], "eliminate")
            self.cost = _Cost.of(self)
        return graphs

    def answer(self, graphs: Mapping[str, GraphModule], inputs: Sequence[Any]) -> Mapping[str, Sequence[torch.Tensor]]:
        found = super().answer(graphs, inputs)
        if self.cost is None and len(self.results) == 1:  # sizes depend on data: count those of this prompt
            self.cost = _Cost.of(self, self.inputs)
        return found


@dataclass
class _Cost:
    """Multiply-adds of one filled graph, beside what they may be."""

    exact: int
    filled: int
    allowed: float
    blocked: list[str]

    @staticmethod
    def of(variants: _Traced, inputs: Sequence[Any] | None = None) -> _Cost | None:
        """The cost of a graph of static shapes; None where shapes depend on data, unless `inputs` say on which."""
        located = variants.located
        assert located is not None and variants.captured is not None
        graphs = (variants.captured, variants.routed["eliminated"], variants.narrowed["eliminated"])
        captured, routed, narrowed = graphs if inputs is None else (_of_one_run(graph, inputs) for graph in graphs)
        exact, filled = multiply_adds(captured.graph), multiply_adds(narrowed.graph)
        form = closed_form(routed, located, variants.split, variants.tail, variants.kept)
        if form is None or not (exact.is_Rational and filled.is_Rational):
            return None
        demands = analyse(routed.graph)
        wide = [node for node, cost in form.items() if demands.on(node) is EVERYTHING and cost.allowed < cost.whole]
        blocked = blocked_nodes(Narrowed(routed, demands, narrowed), located) or _wideners(wide, demands)
        names = dict.fromkeys(_name(node) for node in (*blocked, *wide))
        return _Cost(int(exact), int(filled), float(sum(cost.allowed for cost in form.values())), list(names))


def _of_one_run(module: GraphModule, inputs: Sequence[Any]) -> GraphModule:
    """A copy of a graph whose sizes are those of one run, those that depend on data among them."""
    copy = copy_module(module)
    for node, value in values_of(copy, inputs).items():
        node.meta["val"] = value
    return copy


def _wideners(wide: list[Node], demands: Demands) -> list[Node]:
    """Readers, near or far, that are computed on some rows and want every row of what they read: their rule says so."""
    found, ahead, seen = [], list(wide), set(wide)
    while ahead:
        value = ahead.pop(0)
        for reader in value.users:
            if reader in seen:
                continue
            if demands.on(reader) is EVERYTHING:
                seen.add(reader)
                ahead.append(reader)
            elif reader in demands.calls:
                call = demands.calls[reader]
                if value in tree_leaves((call.args, call.kwargs), is_leaf=lambda leaf: isinstance(leaf, Need)):
                    seen.add(reader)
                    found.append(reader)
    return found


def _name(node: Node) -> str:
    """Op and shape of a node, and the module class it is in: the same for every layer."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    kind = getattr(stack[-1][1], "__name__", str(stack[-1][1]).rpartition(".")[2]) if stack else "the model"
    value = node.meta.get("val")
    sizes = list(shape(node)) if isinstance(value, torch.Tensor) else "several results"
    return f"{node.target} {sizes} in {kind}"


def check_model(
    model: nn.Module, name: str = "", *, quick: bool = False, split: int = SPLIT, tail: int = TAIL
) -> Verdict:
    """Check one decoder. The model is run, on the CPU, in the dtype it has.

    Args:
        model: a causal decoder in eval mode, called with `input_ids`.
        name: what to call it in the verdict.
        quick: prompts of one length and of changing lengths only.
        split: first late layer.
        tail: exact tail rows, fewer than 47.
    """
    verdict = Verdict(name or type(model).__name__, quick=quick, dtype=_dtype_of(model))
    started = time.perf_counter()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            _check(verdict, model, quick, split, tail)
        except Exception as error:  # a model's own code may raise anything, and each is a finding
            verdict.sound = False
            verdict.reason = verdict.reason or f"crashed: {_first_line(error)}"
        finally:
            torch._dynamo.reset()
    verdict.seconds = round(time.perf_counter() - started, 2)
    return verdict


def _dtype_of(model: nn.Module) -> str:
    parameter = next(model.parameters(), None)
    return "none" if parameter is None else str(parameter.dtype).removeprefix("torch.")


def _check(verdict: Verdict, model: nn.Module, quick: bool, split: int, tail: int) -> None:
    caller = Caller(model, KEPT)
    if caller.wrapped:
        verdict.notes.append("forward takes no logits_to_keep: a wrapper keeps the last rows' logits")
    caller.module(**caller.prompt(caller.ids(ROWS[0])))
    verdict.built = True
    for kind, prepare in _kinds(caller, quick):
        variants = _Traced(split=split, tail=tail)
        outcome = _run(caller, variants, prepare, verdict)
        if outcome.startswith("failed"):
            outcome = _in_double(caller, prepare, verdict, outcome, variants)
        verdict.calls[kind] = outcome
        if kind == "lengths":
            _take_over(verdict, variants, outcome, split)
            if not verdict.filled:
                break
    bad = [f"{kind}: {outcome}" for kind, outcome in verdict.calls.items() if outcome.startswith("failed")]
    verdict.sound = not bad
    if bad:
        verdict.reason = "; ".join(bad)


Prepare = Callable[[], list[dict[str, Any]] | None]


def _kinds(caller: Caller, quick: bool) -> Iterator[tuple[str, Prepare]]:
    """Names of the kinds of call, each with what gives fresh arguments of its calls (caches are written in place)."""

    def one(call: dict[str, Any] | None) -> list[dict[str, Any]] | None:
        return None if call is None else [call]

    yield "lengths", lambda: [caller.prompt(caller.ids(rows)) for rows in ROWS]
    if not quick:
        yield "left padding", lambda: one(caller.padded(caller.ids(53, batch=2)))
        yield "continued", lambda: one(caller.continued(caller.ids(20, seed=5), caller.ids(43)))


def _run(caller: Caller, variants: _Traced, prepare: Prepare, verdict: Verdict) -> str:
    """Outcome of one kind of call."""
    try:
        calls = prepare()
        if calls is None:
            return "skipped: the model does not take such a call"
        expected = [logits_of(caller.module(**call)) for call in calls]
    except Exception as error:  # a model's own code may raise anything
        return f"skipped: the model itself fails: {_first_line(error)}"
    flags = FEWER_BREAKS if any(note.startswith("traced with") for note in verdict.notes) else {}
    try:
        found = _compiled(caller, variants, prepare, flags)
    except Exception as error:  # whose fault it is shows without us
        return f"{'failed' if _compiles(caller, prepare) else 'skipped'}: compiled, it raises {_first_line(error)}"
    if not verdict.graphs and variants.graphs_of_first_call > 1:
        found = _with_fewer_breaks(caller, variants, prepare, verdict) or found
    return _judged(caller, variants, prepare, worst(expected, found), len(calls))


def _with_fewer_breaks(
    caller: Caller, variants: _Traced, prepare: Prepare, verdict: Verdict
) -> list[torch.Tensor] | None:
    """Logits of the model traced with `FEWER_BREAKS`, if it breaks less so; what was seen goes into `variants`."""
    flags = ", ".join(f"torch._dynamo.config.{flag}" for flag in FEWER_BREAKS)
    again = _Traced(split=variants.split, tail=variants.tail)
    try:
        outputs = _compiled(caller, again, prepare, FEWER_BREAKS)
    except Exception as error:  # without, it ran
        verdict.notes.append(f"with {flags} it raises {_first_line(error)}")
        return None
    if again.graphs_of_first_call >= variants.graphs_of_first_call:
        return None
    vars(variants).update(vars(again))
    verdict.notes.append(f"traced with {flags}")
    return outputs


def _in_double(caller: Caller, prepare: Prepare, verdict: Verdict, outcome: str, variants: _Traced) -> str:
    """The outcome in fp64, if the model runs in it: where scores tie, fp32 rounding decides which are chosen."""
    parameters = list(caller.model.parameters())
    if parameters[0].dtype != torch.float32 or sum(p.numel() for p in parameters) > MOST_IN_DOUBLE:
        return outcome
    caller.model.double()
    try:
        again = _Traced(split=variants.split, tail=variants.tail)
        found = _run(caller, again, prepare, verdict)
    except Exception:  # many models mix dtypes
        return outcome
    finally:
        caller.model.float()
    if found == "ok":
        verdict.notes.append(f"unstable in fp32, right in fp64: {outcome}")
    return found if found == "ok" else outcome


def _compiled(caller: Caller, variants: _Traced, prepare: Prepare, flags: Mapping[str, bool]) -> list[torch.Tensor]:
    """Logits of the compiled model."""
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(dict(flags)) if flags else contextlib.nullcontext():
        substitute_recurrences(caller.module)
        compiled = torch.compile(caller.module, backend=variants)
        logits = []
        for call in prepare() or []:
            logits.append(logits_of(compiled(**call)))
            variants.graphs_of_first_call = variants.graphs_of_first_call or variants.graphs_seen
        return logits


def _judged(caller: Caller, variants: _Traced, prepare: Prepare, traced: float, calls: int) -> str:
    dtype = next(caller.model.parameters()).dtype
    tolerance = TOLERANCE.get(dtype, 2e-2)
    if traced > 10 * tolerance and worst(*_twice(caller, prepare)) < traced / 2:
        return f"failed: compiled, the exact model answers otherwise (by {traced:.1g})"
    if not variants.results:
        return f"refused: {_refusal(variants)}"
    pairs = {"oracle": "exact", "eliminated": "routed"}
    found = {name: max(worst(r[other], r[name]) for r in variants.results) for name, other in pairs.items()}
    wrong = [f"{name} != {pairs[name]} (by {gap:.1g})" for name, gap in found.items() if not gap < tolerance]
    if wrong:
        return f"failed: {', '.join(wrong)}"
    assert variants.located is not None
    mapped = len(variants.located.layers) > variants.split + 1  # the split layer itself reads true inputs
    if mapped and not any(worst(r["exact"], r["eliminated"]) > tolerance for r in variants.results):
        return "failed: the fill changed nothing"
    filled = len(variants.results)
    return "ok" if filled == calls else f"ok, but {filled} of {calls} filled: {_refusal(variants)}"


def _twice(caller: Caller, prepare: Prepare) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The model uncompiled, and compiled by Dynamo alone: what they differ by is none of our doing."""
    torch._dynamo.reset()
    compiled = torch.compile(caller.module, backend="eager")
    uncompiled = [logits_of(caller.module(**call)) for call in prepare() or []]
    return uncompiled, [logits_of(compiled(**call)) for call in prepare() or []]


def _compiles(caller: Caller, prepare: Prepare) -> bool:
    """Whether Dynamo alone can compile the model, and run it."""
    try:
        _twice(caller, prepare)
    except Exception:  # a model's own code may raise anything
        return False
    return True


def _refusal(variants: _Traced) -> str:
    breaks = (
        [str(reason).splitlines()[0] for reason in counters["graph_break"]] if variants.graphs_of_first_call > 1 else []
    )
    broken = f" (a graph break: {breaks[0]})" if breaks else ""
    if variants.refusals:
        return f"{variants.refusals[0]}{broken}"
    return f"{Counter(variants.plans).most_common(1)[0][0] if variants.plans else 'nothing was traced'}{broken}"


def _take_over(verdict: Verdict, variants: _Traced, outcome: str, split: int) -> None:
    """What the static graph tells of layers and cost."""
    verdict.graphs = variants.graphs_of_first_call
    verdict.layer_count = len(variants.located.layers) if variants.located else 0
    if outcome.startswith("refused"):
        verdict.reason = outcome.removeprefix("refused: ")
        return
    cost = variants.cost
    verdict.filled = bool(variants.results)
    verdict.reason = outcome if outcome.startswith("ok,") else ""
    if cost is not None:
        verdict.gain = round(cost.exact / max(1, cost.filled), 3)
        verdict.eliminated = cost.filled <= cost.allowed + 0.5
        verdict.blocked_by = cost.blocked[:MOST_BLOCKED]
        if verdict.gain < LEAST_GAIN:
            verdict.filled, verdict.reason = False, f"filling would save nothing (multiply-adds {verdict.gain:.2f}x)"
    verdict.filled_layers = verdict.layer_count - split if verdict.filled else 0


def _first_line(error: BaseException) -> str:
    error = getattr(error, "inner_exception", error)  # what was raised while compiling
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:300]
