"""`model.compile(backend="ridgefill")` and then `generate()`, in every way it is called.

With route "oracle" prefix rows are given their true values, so that tokens and logits must be the exact model's,
whatever the shapes, caches and masks are.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from ridgefill_compile import backend
from ridgefill_compile.errors import RidgefillWarning
from ridgefill_compile.report import GraphReport, report
from tests.decoders import cache_of, states_of, token_ids
from tests.toys import LONG, ORACLE, SHORT, TAIL, compiled, distance, pretrained, random_maps

CLOSE = 1e-4
OPTIONS = ORACLE | {"split": 0}  # of two layers, one has a predicted input
RIDGE = OPTIONS | {"route": "ridge", "maps": random_maps(64, layers=2, splits=(0,))}


@dataclass
class Twins:
    """The same model twice, one of them compiled; what one generates the other must, too."""

    exact: Any
    filled: Any
    cache: str = field(init=False)  # what `generate` calls the cache; its name changed

    def __post_init__(self) -> None:
        known = inspect.signature(self.exact.forward).parameters
        self.cache = "cache" if "cache" in known else "past_key_values"

    @classmethod
    def of(cls, name: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> Twins:
        exact, filled = pretrained(name).to(dtype), pretrained(name).to(dtype)
        filled.compile(backend=backend.ridgefill, options=OPTIONS | options)
        return cls(exact, filled)

    @property
    def graphs(self) -> list[GraphReport]:
        return report(self.filled).graphs

    @property
    def prefills(self) -> list[GraphReport]:
        return [graph for graph in self.graphs if graph.filled]

    def generate(self, *args: Any, close: float = CLOSE, **settings: Any) -> tuple[Any, Any]:
        """What both generate, after comparing tokens, logits and caches."""
        exact, filled = generate(self.exact, *args, **settings), generate(self.filled, *args, **settings)
        self.agree(exact, filled, close)
        return exact, filled

    def agree(self, exact: Any, filled: Any, close: float = CLOSE) -> None:
        assert torch.equal(exact.sequences, filled.sequences)
        torch.testing.assert_close(filled.logits, exact.logits, atol=close, rtol=close)
        torch.testing.assert_close(states_of(filled), states_of(exact), atol=close, rtol=close)


def generate(model: Any, *args: Any, **settings: Any) -> Any:
    """Two tokens, greedily unless told otherwise; with a fixed seed, logits and cache."""
    torch.manual_seed(7)
    plan = {"max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(*args, **plan | settings)


def padded(rows: int, pads: int, batch: int = 2) -> dict[str, Any]:
    """Prompts of which the first is shorter."""
    mask = torch.ones(batch, rows, dtype=torch.int64)
    mask[0, :pads] = 0
    return {"inputs": token_ids(rows, batch), "attention_mask": mask}


def test_any_length_costs_four_compilations() -> None:
    twins = Twins.of()
    for rows in (LONG, 61, 33, 80, 24, 57):
        twins.generate(token_ids(rows), max_new_tokens=4)
    assert len(twins.graphs) == 4
    assert [(graph.rows, graph.dynamic) for graph in twins.prefills] == [(LONG, False), (61, True)]
    for rows in (SHORT, 12, 9, 71):  # what is too short to fill takes one more, for all of them
        twins.generate(token_ids(rows))
    assert len(twins.graphs) == 5
    for batch, rows in ((2, 30), (3, 55), (2, 80), (4, 41)):  # and batches two more, of any size
        twins.generate(token_ids(rows, batch))
    assert len(twins.graphs) == 7
    assert len(twins.prefills) == 3


def test_left_padded_batches() -> None:
    twins = Twins.of()
    twins.generate(**padded(LONG, pads=9))
    twins.generate(**padded(53, pads=30))  # the first prompt ends in the tail's own rows
    twins.generate(**padded(61, pads=61 - TAIL // 2))
    assert len(twins.prefills) == 2


def test_static_cache() -> None:
    twins = Twins.of()
    for rows in (LONG, 57, 48):
        twins.generate(token_ids(rows), cache_implementation="static")
    assert [graph.dynamic for graph in twins.prefills] == [False, True]
    assert len(twins.graphs) == 4  # decoding writes into a cache of two lengths


def test_second_turn_with_the_returned_cache() -> None:
    """The new rows are split into prefix and tail; old rows are keys only."""
    twins = Twins.of()
    exact, filled = twins.generate(token_ids(LONG))
    for rows in (33, 50):
        ids = torch.cat([exact.sequences, token_ids(rows, seed=rows)], dim=1)
        exact = generate(twins.exact, ids, **{twins.cache: cache_of(exact)})
        filled = generate(twins.filled, ids, **{twins.cache: cache_of(filled)})
        twins.agree(exact, filled)
    assert [(graph.rows, graph.dynamic) for graph in twins.prefills] == [(LONG, False), (34, True)]


@pytest.mark.parametrize(
    "settings",
    [{"num_beams": 3, "num_return_sequences": 2}, {"do_sample": True, "top_k": 20, "num_return_sequences": 2}],
    ids=["beams", "samples"],
)
def test_other_ways_of_decoding(settings: dict[str, Any]) -> None:
    twins = Twins.of()
    twins.generate(token_ids(LONG), **settings)
    assert len(twins.prefills) == 1


def test_layers_that_slide_and_layers_that_do_not() -> None:
    kinds: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"]}
    exact, filled = (pretrained("gemma3_text", **kinds) for _ in range(2))
    filled.compile(backend=backend.ridgefill, options=OPTIONS)
    twins = Twins(exact, filled)
    twins.generate(token_ids(LONG))
    assert len(twins.prefills) == 1


def test_bfloat16() -> None:
    twins = Twins.of(dtype=torch.bfloat16)
    twins.generate(token_ids(LONG), close=0.05)
    assert len(twins.prefills) == 1


@pytest.mark.parametrize("options", [OPTIONS, RIDGE], ids=["oracle", "ridge"])
def test_embeddings_instead_of_ids(options: dict[str, Any]) -> None:
    by_ids, by_embeddings = pretrained(), pretrained()
    with torch.no_grad():
        embedded = by_ids.get_input_embeddings()(token_ids(LONG))
    call = {"use_cache": True, "logits_to_keep": 2}
    expected = compiled(by_ids, options)(token_ids(LONG), **call)
    assert distance(compiled(by_embeddings, options)(inputs_embeds=embedded, **call), expected) < CLOSE
    assert [graph.filled for graph in report(by_embeddings).graphs] == [True]


def test_as_many_logits_as_the_tail() -> None:
    """From the second number on it is symbolic: whether it is within the tail is one guard, and one graph for all."""
    exact, model = pretrained(), pretrained()
    fast = compiled(model, OPTIONS)
    for keep, filled in ((1, [True]), (TAIL, [True] * 2), (5, [True] * 2), (TAIL + 1, [True, True, False])):
        with torch.no_grad():
            expected = exact(token_ids(LONG), use_cache=True, logits_to_keep=keep)
        with nullcontext() if filled[-1] else pytest.warns(RidgefillWarning, match="more rows than the tail"):
            found = fast(token_ids(LONG), use_cache=True, logits_to_keep=keep)
        assert distance(found, expected) < CLOSE
        assert [graph.filled for graph in report(model).graphs] == filled


class Handed:
    """Stands for the backend, and notes what Dynamo hands it and what it hands on to the inner compiler."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pairs: list[tuple[GraphModule, str, GraphModule]] = []
        self._given: list[GraphModule] = []
        monkeypatch.setattr(backend, "inner_compiler", self._inner)

    def __call__(self, module: GraphModule, example_inputs: Sequence[Any], **settings: Any) -> Any:
        self._given.append(module)
        self._text = module.code
        return backend.ridgefill(module, example_inputs, **settings)

    def _inner(self, options: Any) -> Any:
        def record(module: GraphModule, example_inputs: Sequence[Any]) -> Any:
            self.pairs.append((self._given[-1], self._text, module))
            return module.forward

        return record


def test_what_is_not_filled_is_the_stock_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    handed = Handed(monkeypatch)
    model = pretrained()
    model.compile(backend=handed, options=OPTIONS | {"route": "identity"})
    for rows in (LONG, 57, SHORT):
        generate(model, token_ids(rows))
    graphs = report(model).graphs
    assert len(graphs) == len(handed.pairs) == 5
    for graph, (given, text, compiled_module) in zip(graphs, handed.pairs, strict=True):
        assert given.code == text, "Dynamo's own graph was changed"
        assert (compiled_module is given) == (not graph.filled)
    assert [graph.reason for graph in graphs if not graph.filled] == [
        "a decode step",
        "a decode step",
        "shorter than tail + min_fill = 24 rows",
    ]


def test_route_exact_is_the_stock_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    handed = Handed(monkeypatch)
    model = pretrained()
    model.compile(backend=handed, options={"route": "exact"})
    generate(model, token_ids(LONG))
    assert all(given is compiled_module and given.code == text for given, text, compiled_module in handed.pairs)
    assert {graph.reason for graph in report(model).graphs} == {"route 'exact'"}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dynamic"), [("llama", [False, True]), ("qwen3", [True])])
def test_inductor_computes_what_eager_does(name: str, dynamic: list[bool]) -> None:
    """Predictions of random maps are wrong, and must be equally wrong."""
    model = pretrained(name)
    eager, inductor = compiled(model, RIDGE), compiled(model, RIDGE | {"inner": "inductor"})
    for rows in (LONG, 61, 75):
        ids = token_ids(rows)
        if dynamic[0]:
            torch._dynamo.mark_dynamic(ids, 1)
        call = {"input_ids": ids, "use_cache": True, "logits_to_keep": 2}
        assert distance(inductor(**call), eager(**call)) < CLOSE
    graphs = report(model).graphs
    assert all(graph.filled for graph in graphs)
    assert [graph.dynamic for graph in graphs] == sorted(2 * dynamic)
