"""Time to first token of the exact and the filled model, measured side by side in one process."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgefill_compile.errors import RidgefillError
from ridgefill_compile.report import GraphReport, report


@dataclass(frozen=True)
class Speed:
    """Seconds to the first token, and what arithmetic would allow.

    Attributes:
        rows, tail, split: of the prompt and the fill.
        exact_s, filled_s: seconds of every measured run, in the order they ran.
        compile_exact_s, compile_filled_s: what the first calls took beyond an ordinary run.
        graph: the compiler's report on the filled graph that was measured.
        ceilings: of that graph at `rows`: `ceiling_layer_passes` and `ceiling_multiply_adds`.
    """

    rows: int
    tail: int
    split: int
    exact_s: list[float]
    filled_s: list[float]
    compile_exact_s: float
    compile_filled_s: float
    graph: GraphReport
    ceilings: Mapping[str, float]

    @property
    def speedup(self) -> float:
        """Median of the exact runs over median of the filled ones."""
        return statistics.median(self.exact_s) / statistics.median(self.filled_s)

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, for JSON; times in seconds."""
        return {
            "ttft_exact_s": statistics.median(self.exact_s),
            "ttft_filled_s": statistics.median(self.filled_s),
            "speedup": self.speedup,
            "ceiling_layer_passes": self.ceilings["ceiling_layer_passes"],
            "ceiling_multiply_adds": self.ceilings["ceiling_multiply_adds"],
            "share_of_ceiling": self.speedup / self.ceilings["ceiling_multiply_adds"],
            "rows": self.rows,
            "tail": self.tail,
            "split": self.split,
            "runs": len(self.exact_s),
            "runs_exact_s": self.exact_s,
            "runs_filled_s": self.filled_s,
            "compile_exact_s": self.compile_exact_s,
            "compile_filled_s": self.compile_filled_s,
            "graph": self.graph.to_dict(),
        }


def measure_speed(
    model: Any,
    ids: Tensor,
    options: Mapping[str, Any],
    *,
    runs: int = 3,
    exact_backend: str | Callable[..., Any] = "inductor",
    warm_up: Sequence[int] = (),
    step: Callable[[], None] = lambda: None,
) -> Speed:
    """Compile a model exactly and filled, and time the two in turn on one prompt.

    Both are compiled by `model.compile`: the exact one as `torch.compile` does by default, the filled one
    with backend "ridgefill". Both write a cache and return the logits of the last row only, as `generate`
    does.

    Args:
        model: a transformers model for causal language modelling.
        ids: `[1, N]` prompt.
        options: of the backend; `split` (or maps that have one) and `tail` among them.
        runs: measured runs of each; the first calls, which compile, are not among them.
        exact_backend: that the exact model is compiled with.
        warm_up: other prompt lengths to run before, in this order. One is enough for dynamic shapes.
        step: called after every run, `calls_of(runs, warm_up)` times in all.

    Raises:
        RidgefillError: the prompt was not filled, or the exact model was compiled by this backend.
    """
    torch._dynamo.reset()  # graphs of earlier calls would change which sizes are compiled as dynamic
    models = {
        "exact": compiled(model, backend=exact_backend),
        "filled": compiled(model, backend="ridgefill", options={**options, "strict": True}),
    }
    before = len(report(model).graphs)
    first: dict[str, float] = {}
    # Both at each length: what Dynamo compiles as dynamic depends on the lengths seen before, by either model.
    for rows in (*warm_up, ids.shape[1]):
        first["exact"] = seconds(models["exact"], ids[:, :rows])
        step()
        if "filled" not in first and len(report(model).graphs) != before:
            raise RidgefillError("the exact model was compiled with the backend it is compared with")
        first["filled"] = seconds(models["filled"], ids[:, :rows])
        step()
    graph = filled_graph(report(model).graphs[before:])
    times = interleaved(models, ids, runs, step)
    rows = ids.shape[1]
    assert graph.split is not None
    assert graph.tail is not None
    return Speed(
        rows=rows,
        tail=graph.tail,
        split=graph.split,
        exact_s=times["exact"],
        filled_s=times["filled"],
        compile_exact_s=max(0.0, first["exact"] - statistics.median(times["exact"])),
        compile_filled_s=max(0.0, first["filled"] - statistics.median(times["filled"])),
        graph=graph,
        ceilings=graph.at(rows),
    )


def calls_of(runs: int, warm_up: Sequence[int] = ()) -> int:
    """How many model calls `measure_speed` makes."""
    return 2 * (runs + len(warm_up) + 1)


def compiled(model: Any, **how: Any) -> Any:
    """A compiled twin that shares every module and parameter with `model`.

    `Module.compile` marks the object it is called on, so each way of compiling needs an object of its own.
    """
    twin = copy.copy(model)
    twin.compile(**how)
    return twin


def first_token(model: Any, ids: Tensor) -> Tensor:
    """The token that follows a prompt, `[1]`: one prefill that leaves a cache, and the last row's logits."""
    with torch.no_grad():
        return model(input_ids=ids, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)  # type: ignore[no-any-return]


def seconds(model: Any, ids: Tensor) -> float:
    """Seconds that the first token of a prompt takes."""
    started = time.perf_counter()
    first_token(model, ids).item()  # waits for a device
    return time.perf_counter() - started


def interleaved(
    models: Mapping[str, Any], ids: Tensor, runs: int, step: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Seconds to the first token, `runs` of each model.

    The models take turns, and every other round goes backwards: a machine that slows down or speeds up
    meanwhile does so for all of them.
    """
    times: dict[str, list[float]] = {name: [] for name in models}
    for run in range(runs):
        order = list(models) if run % 2 == 0 else list(models)[::-1]
        for name in order:
            times[name].append(seconds(models[name], ids))
            step()
    return times


def filled_graph(graphs: Sequence[GraphReport]) -> GraphReport:
    """The newest filled graph among those compiled for a prompt.

    Raises:
        RidgefillError: none is filled. Says why.
    """
    for graph in reversed(graphs):
        if graph.filled:
            return graph
    reasons = "; ".join(graph.reason for graph in graphs if graph.rows is not None) or "no prompt was compiled"
    raise RidgefillError(f"the prompt was not filled: {reasons}")
