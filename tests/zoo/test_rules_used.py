"""Every row rule is there for some architecture, of transformers or not: what none needs is deleted. (Of one rule's
ops, which are often names of the same, not each must be called by one.)
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn
from torch.fx import Node

from ridgefill_compile.passes import demand
from ridgefill_compile.passes.calls import Call
from ridgefill_compile.passes.rows import Rows
from ridgefill_compile.passes.rules import RULES, narrowed_call
from ridgefill_compile.recurrences.substitute import substitute_recurrences
from ridgefill_compile.testing import Decoder, DecoderConfig, Routing
from ridgefill_compile.testing.variants import Variants
from ridgefill_compile.zoo.calling import Caller
from ridgefill_compile.zoo.shrink import model_types, tiny_config, tiny_model


def ops_narrowed(model: nn.Module, call: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """Ops of one decoder that a rule narrowed, in whatever analysis of one prompt."""
    used: set[Any] = set()

    def noting(node: Node, rows: Rows, *more: Any) -> Call | None:
        narrowed = narrowed_call(node, rows, *more)
        if narrowed is not None:
            used.add(node.target)
        return narrowed

    monkeypatch.setattr(demand, "narrowed_call", noting)
    Variants(ways={"eliminated": ("ridge", True)}, tail=16, verified=False).run(model, call)
    return used


def prompts_of(kind: str) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
    """A tiny model of a type, with two kinds of prompt."""
    caller = Caller(tiny_model(tiny_config(kind)), 2)
    substitute_recurrences(caller.module)
    ids = caller.ids(53, batch=2)
    yield from ((caller.module, call) for call in (caller.prompt(ids), caller.padded(ids)) if call is not None)


def test_decoders_from_elsewhere_use_rules_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which no type of transformers does."""
    assert {RULES[op].__name__ for op in ops_from_elsewhere(monkeypatch) if op in RULES} >= {"einsum", "one_hot"}


def ops_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """Ops narrowed in a plain module, whose experts each work on every row."""
    config = DecoderConfig(layers=3, experts=3)
    return ops_narrowed(Decoder(config), Routing(batch=2, rows=53).inputs(config), monkeypatch)


@pytest.mark.heavy
def test_every_rule_is_for_some_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    unused = set(RULES.values()) - {RULES[op] for op in ops_from_elsewhere(monkeypatch) if op in RULES}
    for kind in model_types():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                for model, call in prompts_of(kind):
                    used = ops_narrowed(model, call, monkeypatch)
                    unused -= {RULES[op] for op in used if op in RULES}
            except Exception:  # a model's own code may raise anything; the zoo says so
                continue
        if not unused:
            break
    assert not unused, sorted(rule.__qualname__ for rule in unused)
