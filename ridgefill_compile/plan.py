"""Is this graph a prefill worth filling? Decided from shapes and options, before anything is traced or changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from ridgefill_compile.options import Options

EMBEDDINGS = (torch.nn.functional.embedding, torch.embedding)


@dataclass(frozen=True)
class Plan:
    """`fill` or not, why not, and the prompt's rows (as traced) with whether other counts are served too."""

    fill: bool
    reason: str
    rows: int | None = None
    dynamic: bool = False


def plan(module: GraphModule, options: Options) -> Plan:
    """Decide for one of Dynamo's graphs.

    Where the number of rows is symbolic, the comparison with `tail + min_fill` becomes one guard of the compiled graph:
    shorter prompts get a graph of their own, compiled as the model wrote it.
    """
    rows = next(prompt_rows(module), None)
    if rows is None:
        return Plan(False, "no prompt enters this graph")
    dynamic = isinstance(rows, torch.SymInt)
    traced = int(rows.node.hint) if isinstance(rows, torch.SymInt) else rows
    if options.route == "exact":
        return Plan(False, "route 'exact'", traced, dynamic)
    lossless = options.route == "lossless"
    least = options.min_fill if lossless else options.tail + options.min_fill
    if traced == 1 and not dynamic:
        return Plan(False, "a decode step", 1)
    if bool(rows < least):
        name = "min_fill" if lossless else "tail + min_fill"
        return Plan(False, f"shorter than {name} = {least} rows", traced, dynamic)
    return Plan(True, "", traced, dynamic)


def prompt_rows(module: GraphModule) -> Iterator[int | torch.SymInt]:
    """Row counts of what may be the prompt: ids [batch, rows] or [rows], or embeddings [batch, rows, hidden]."""
    yield from (node.meta["example_value"].shape[-1] for node in token_ids(module))
    for node in module.graph.nodes:
        value = _value(node) if node.op == "placeholder" else None
        if value is None or isinstance(value, torch.nn.Parameter):
            continue
        if value.dim() == 3 and value.is_floating_point():
            yield value.shape[1]


def token_ids(module: GraphModule) -> list[Node]:
    """What may be the ids of the prompt, [batch, rows] or [rows]: what embeddings are looked up by."""
    calls = [node for node in module.graph.nodes if node.op == "call_function" and node.target in EMBEDDINGS]
    looked_up = [node.args[0] if node.args else node.kwargs.get("input") for node in calls]
    return [ids for ids in looked_up if (value := _value(ids)) is not None and value.dim() in (1, 2)]


def sources_of_ids(module: GraphModule) -> set[Node]:
    """Inputs that may hold the prompt's ids: those of whole numbers that lookups come from, by views or changed."""
    seen: set[Node] = set()
    found = token_ids(module)
    while found:
        node = found.pop()
        seen.add(node)
        found += [source for source in node.all_input_nodes if source not in seen]
    return {node for node in seen if node.op == "placeholder" and _is_whole_numbers(_value(node))}


def _is_whole_numbers(value: torch.Tensor | None) -> bool:
    return value is not None and value.dtype in (torch.int64, torch.int32) and value.dim() in (1, 2)


def _value(node: object) -> torch.Tensor | None:
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None
