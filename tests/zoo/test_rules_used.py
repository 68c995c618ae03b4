"""Every row rule is there for some architecture: what none needs is deleted. (Of one rule's ops, which are often names
of the same, not each must be called by a decoder of transformers.)
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.fx import Node

from ridgefill_compile.passes import demand
from ridgefill_compile.passes.calls import Call
from ridgefill_compile.passes.rows import Rows
from ridgefill_compile.passes.rules import RULES, narrowed_call
from ridgefill_compile.recurrences.substitute import substitute_recurrences
from ridgefill_compile.testing.variants import Variants
from ridgefill_compile.zoo.calling import Caller
from ridgefill_compile.zoo.shrink import model_types, tiny_config, tiny_model


def ops_narrowed(kind: str, monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """Ops of one type's decoder that a rule narrowed, in whatever analysis of two kinds of prompt."""
    used: set[Any] = set()

    def noting(node: Node, rows: Rows, *more: Any) -> Call | None:
        call = narrowed_call(node, rows, *more)
        if call is not None:
            used.add(node.target)
        return call

    monkeypatch.setattr(demand, "narrowed_call", noting)
    caller = Caller(tiny_model(tiny_config(kind)), 2)
    substitute_recurrences(caller.module)
    ids = caller.ids(53, batch=2)
    for call in (caller.prompt(ids), caller.padded(ids)):
        torch._dynamo.reset()
        if call is not None:
            backend = Variants(ways={"eliminated": ("ridge", True)}, verified=False)
            torch.compile(caller.module, backend=backend)(**call)
    return used


@pytest.mark.heavy
def test_every_rule_is_for_some_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    unused = set(RULES.values())
    for kind in model_types():
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            try:
                unused -= {RULES[op] for op in ops_narrowed(kind, monkeypatch) if op in RULES}
            except Exception:  # a model's own code may raise anything; the zoo says so
                continue
        if not unused:
            break
    assert not unused, sorted(rule.__qualname__ for rule in unused)
