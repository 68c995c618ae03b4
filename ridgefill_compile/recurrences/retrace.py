"""Tracing again where a graph holds recurrences step by step that an operator computes as well.

`torch.compile` loads this package when the backend is first looked up, and modelling files of transformers are seen
then, or when they are loaded. Those of other packages are seen when the first graph of such a model reaches the
backend: their recurrences are substituted then, and Dynamo is asked to trace the frame anew.
"""

from __future__ import annotations

import sys

import torch
from torch._dynamo.exc import ShortenTraceback, UnspecializeRestartAnalysis
from torch.fx import GraphModule

from ridgefill_compile.recurrences.substitute import (
    files_of,
    known_substitutions,
    modelling_files,
    substitute_recurrences,
)

_seen: set[str] = set()


class Retrace(ShortenTraceback, UnspecializeRestartAnalysis):
    """Ask Dynamo to trace the frame that it is compiling once more, from what it then finds.

    `RestartAnalysis` is what Dynamo itself raises for that (unspecializing also forgets where the last attempt broke
    the graph); of what a backend raises, it lets `ShortenTraceback` through and wraps the rest.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason, first_useful_frame=None, restart_reason=reason)


def retrace_with_operators(module: GraphModule) -> None:
    """Substitute recurrences of the files that a graph's modules are defined in, and of all modelling files of
    transformers, each looked through once.

    Raises:
        Retrace: some were substituted, and Dynamo is waiting for this graph.
    """
    new = {
        name for name in (*files_of(_kinds(module)), *modelling_files()) if name not in _seen and name in sys.modules
    }
    if not new:
        return
    _seen.update(new)
    before = set(known_substitutions())
    done = substitute_recurrences(sys.modules[name] for name in sorted(new))
    found = sorted({each.function for each in done if each.operator and each not in before})
    if found and torch._guards.CompileContext.try_get() is not None:
        raise Retrace(f"{', '.join(found)} can be traced as one operator")


def _kinds(module: GraphModule) -> set[type]:
    """Classes of the modules that a graph was traced from."""
    found = (kind for node in module.graph.nodes for _, kind in (node.meta.get("nn_module_stack") or {}).values())
    return {kind for kind in found if isinstance(kind, type)}
