"""What `report(model)` says, and the graphs that are written as text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgefill_compile.backend import ridgefill
from ridgefill_compile.cost import layer_pass_ceiling
from ridgefill_compile.options import DUMP_VARIABLE
from ridgefill_compile.report import NOTHING_COMPILED, GraphReport, Report, report
from ridgefill_compile.testing import Decoder
from tests.decoders import FILLED, cache_of, token_ids
from tests.toys import IDENTITY, LONG, SHORT, TAIL, compiled, plain, pretrained, prompt

KEEP = {"logits_to_keep": 2}
PROMISED = {
    "filled",
    "reason",
    "rows",
    "split",
    "tail",
    "multiply_adds_exact",
    "multiply_adds_filled",
    "pass_seconds",
    "inner_seconds",
}


@pytest.fixture(scope="module")
def model() -> Decoder:
    """A model with three graphs: one length, any length, and any that is too short."""
    model = plain()
    fast = compiled(model, IDENTITY)
    for rows in (LONG, 61, SHORT):
        fast(prompt(rows), **KEEP)
    return model


def test_a_filled_graph(model: Decoder) -> None:
    graph = report(model).graphs[0]
    assert graph.filled
    assert (graph.rows, graph.dynamic, graph.split, graph.tail, graph.layers) == (LONG, False, 1, TAIL, 3)
    assert graph.reason == "prefix rows are filled from layer 1 on"
    assert (graph.node, graph.hint, graph.graph_break, graph.blocked) == (None, None, None, [])
    assert graph.multiply_adds_exact is not None
    assert graph.multiply_adds_filled is not None
    assert 0 < graph.multiply_adds_filled < graph.multiply_adds_exact
    assert graph.ceiling_multiply_adds == graph.multiply_adds_exact / graph.multiply_adds_filled
    assert graph.ceiling_layer_passes == pytest.approx(1 / (1 / 3 + 2 / 3 * TAIL / LONG))
    assert list(graph.pass_seconds) == [
        "capture", "locate", "check", "route", "unfuse", "demand", "eliminate", "cost", "attend",
    ]  # fmt: skip
    assert all(seconds > 0 for seconds in graph.pass_seconds.values())


def test_numbers_at_other_lengths(model: Decoder) -> None:
    static, dynamic, _ = report(model).graphs
    assert (static.dynamic, dynamic.dynamic) == (False, True)
    at = dynamic.at(LONG)
    assert at["multiply_adds_exact"] == static.multiply_adds_exact
    assert at["multiply_adds_filled"] == static.multiply_adds_filled
    assert at["ceiling_layer_passes"] == static.ceiling_layer_passes
    assert static.at(LONG) == at
    assert dynamic.at(61)["multiply_adds_exact"] == dynamic.multiply_adds_exact
    assert at["ceiling_multiply_adds"] < dynamic.at(4096)["ceiling_multiply_adds"]
    assert dynamic.at(4096)["ceiling_layer_passes"] == layer_pass_ceiling(1, 3, 4096, TAIL)
    with pytest.raises(ValueError, match="compiled for 40 rows only"):
        static.at(41)
    with pytest.raises(ValueError, match="not filled"):
        GraphReport().at(LONG)


def test_each_model_has_its_own() -> None:
    narrow, wide = plain(), plain(width=12)
    compiled(narrow, IDENTITY)(prompt(), **KEEP)
    assert report(wide).graphs == []
    compiled(wide, IDENTITY | {"split": 2})(prompt(), **KEEP)
    compiled(narrow, IDENTITY)(prompt(SHORT), **KEEP)
    assert [graph.split for graph in report(narrow).graphs] == [1, None]
    assert [graph.split for graph in report(wide).graphs] == [2]


def test_in_the_order_of_compilation() -> None:
    model = plain()
    for split in (2, 1, 0):
        compiled(model, IDENTITY | {"split": split})(prompt(), **KEEP)
    assert [graph.split for graph in report(model).graphs] == [2, 1, 0]


def test_what_never_ran_compiled_is_told_how() -> None:
    wrapped: Any = torch.compile(pretrained(), backend=ridgefill, options=IDENTITY)
    wrapped.generate(token_ids(LONG), max_new_tokens=1)  # the uncompiled model's
    assert str(report(wrapped)) == NOTHING_COMPILED
    assert "model.compile(backend='ridgefill'" in NOTHING_COMPILED
    assert report(wrapped).to_dict() == {"graphs": []}


def test_plain_values_for_json(model: Decoder) -> None:
    told = report(model).to_dict()
    assert json.loads(json.dumps(told)) == told
    for graph, said in zip(report(model).graphs, told["graphs"], strict=True):
        assert said == graph.to_dict()
        assert said.keys() >= PROMISED
        assert said["filled"] == graph.filled
        assert not said.keys() & {"formulas", "sizes", "row_symbol"}


def test_a_line_per_graph_for_people(model: Decoder) -> None:
    filled, dynamic, short = str(report(model)).splitlines()
    assert re.fullmatch(
        r"graph 0: filled, 40 rows: prefix rows are filled from layer 1 on; split 1 of 3, tail 16, route identity; "
        r"multiply-adds \S+ -> \S+ \(ceiling 1\.\d\dx, by layer passes 1\.67x\); "
        r"passes \d\.\d s, inner compiler 0\.0 s",
        filled,
    )
    assert dynamic.startswith("graph 1: filled, 61 rows (any length): ")
    assert short.startswith("graph 2: exact, 23 rows (any length): shorter than tail + min_fill = 24 rows; passes")


def test_what_stands_in_the_way_is_said() -> None:
    graph = GraphReport(reason="why", node="node x", hint="what to do", graph_break="file:1", blocked=["node y"])
    _, *details = str(Report([graph])).splitlines()
    assert details == ["  at: node x", "  do: what to do", "  break: file:1", "  on every row: node y"]


class TestDump:
    FILES = (
        "00.capture.after",
        "01.route.before",
        "02.route.after",
        "03.unfuse.before",
        "04.unfuse.after",
        "05.eliminate.before",
        "06.eliminate.after",
        "07.attend.before",
        "08.attend.after",
    )

    def check(self, folder: Path) -> None:
        (graph,) = folder.iterdir()
        written = sorted(graph.iterdir())
        assert [file.name for file in written] == [f"{name}.txt" for name in self.FILES]
        captured, before, routed, again, apart, joint, eliminated, *attend = (file.read_text() for file in written)
        assert before == captured
        assert again == apart == joint == routed  # its projections are apart already
        assert attend == [eliminated] * 2  # on CPU, of a tail alone, its attention is as it should be
        assert "= aten.cat.default([slice_tensor, slice_tensor_1], 1)" in routed
        lines = {line.split(":", 1)[0]: line for line in routed.splitlines()}
        line = next(text for name, text in lines.items() if name.startswith("scaled_dot_product_attention_2"))
        assert "float32[1, 2, 40, 4], read: last 2 of dim 2  = aten.scaled_dot_product_attention.default(" in line
        assert line.endswith("blocks.2.attention")
        assert "float32[1, 2, 2, 4], read: whole  = aten.scaled_dot_product_attention.default(" in eliminated
        assert eliminated.splitlines()[-1].startswith("return (")

    def test_by_option(self, tmp_path: Path) -> None:
        compiled(plain(), IDENTITY | {"dump": tmp_path})(prompt(), **KEEP)
        self.check(tmp_path)

    def test_by_environment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(DUMP_VARIABLE, str(tmp_path / "made"))
        compiled(plain(), IDENTITY)(prompt(), **KEEP)
        self.check(tmp_path / "made")

    def test_with_symbolic_sizes(self, tmp_path: Path) -> None:
        fast = compiled(plain(), IDENTITY | {"dump": tmp_path})
        for rows in (LONG, 61):
            fast(prompt(rows), **KEEP)
        static, dynamic = sorted(tmp_path.iterdir())
        texts = [next(folder.glob("*eliminate.after.txt")).read_text() for folder in (static, dynamic)]
        assert "[1, 40]" in texts[0]
        assert re.search(r"int64\[1, s\d+\]", texts[1])

    def test_nothing_unless_asked(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(DUMP_VARIABLE, raising=False)
        monkeypatch.chdir(tmp_path)
        compiled(plain(), IDENTITY)(prompt(), **KEEP)
        assert list(tmp_path.iterdir()) == []


def test_selected_and_formerly_filled_rows_are_told() -> None:
    """How many rows selectors keep, how many a run fills, and that a second turn goes on with filled rows."""
    model = FILLED["llama"].build()
    torch._dynamo.reset()
    options: dict[str, Any] = {
        "route": "identity", "split": 2, "tail": 8, "min_fill": 8, "inner": "eager", "rows": "random:0.25",
    }  # fmt: skip
    fast = torch.compile(model, backend="ridgefill", options=options)
    with torch.no_grad():
        first = fast(token_ids(rows=48), use_cache=True, logits_to_keep=1)
        fast(token_ids(rows=28), use_cache=True, logits_to_keep=1, past_key_values=cache_of(first))
    found = report(model)
    assert [(graph.kept, graph.rows_filled, graph.continues) for graph in found.graphs] == [
        (10, 30, False),
        (5, 15, True),
    ]
    assert "10 rows of the prefix exact" in str(found)
    assert "rows of earlier prompts, of which up to 30 are filled" in str(found)
