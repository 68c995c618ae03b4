"""Timing: what is compared, in which order, and that nothing is called filled that is not."""

from functools import partial

import pytest
import torch

from ridgefill_compile.backend import ridgefill
from ridgefill_compile.errors import RidgefillError
from ridgefill_compile.evaluate import speed
from ridgefill_compile.report import GraphReport, report
from tests.evaluate.tiny import LAYERS, tiny_maps, tiny_model

OPTIONS = {"split": 2, "tail": 16, "min_fill": 8, "inner": "eager"}


def prompt(rows=96):
    return torch.randint(0, 64, (1, rows))


def test_exact_and_filled_are_measured_side_by_side():
    model, steps = tiny_model(), []
    found = speed.measure_speed(
        model, prompt(), {**OPTIONS, "maps": tiny_maps()}, runs=2, step=lambda: steps.append(1), exact_backend="eager"
    )
    assert len(steps) == speed.calls_of(2)
    assert (found.rows, found.tail, found.split) == (96, 16, 2)
    assert len(found.exact_s) == len(found.filled_s) == 2
    assert found.graph.filled
    assert found.graph.layers == LAYERS
    told = found.to_dict()
    assert told["speedup"] == pytest.approx(told["ttft_exact_s"] / told["ttft_filled_s"])
    assert told["ceiling_multiply_adds"] > 1
    assert told["ceiling_layer_passes"] == pytest.approx(1 / (1 / 2 + 1 / 2 * 16 / 96))


def test_another_length_first_makes_the_graph_dynamic():
    model = tiny_model()
    found = speed.measure_speed(
        model, prompt(), {**OPTIONS, "maps": tiny_maps()}, runs=1, warm_up=(64,), exact_backend="eager"
    )
    assert found.graph.dynamic
    assert found.ceilings["ceiling_layer_passes"] == pytest.approx(1 / (1 / 2 + 1 / 2 * 16 / 96))


def test_a_prompt_that_is_not_filled_is_not_timed():
    with pytest.raises(RidgefillError, match="not filled: "):
        speed.measure_speed(
            tiny_model(),
            prompt(),
            {**OPTIONS, "min_fill": 1000, "maps": tiny_maps()},
            runs=1,
            exact_backend="eager",
        )


def test_the_exact_model_must_not_be_ours():
    ours = partial(ridgefill, options={"route": "exact"})
    with pytest.raises(RidgefillError, match="compared with"):
        speed.measure_speed(tiny_model(), prompt(), {**OPTIONS, "maps": tiny_maps()}, runs=1, exact_backend=ours)


def test_a_compiled_twin_leaves_the_model_alone():
    model = tiny_model()
    twin = speed.compiled(model, backend="ridgefill", options={**OPTIONS, "route": "identity"})
    assert twin.lm_head is model.lm_head
    ids = prompt()
    speed.first_token(model, ids)
    assert report(model).graphs == []
    speed.first_token(twin, ids)
    assert [graph.filled for graph in report(model).graphs] == [True]


def test_models_take_turns_and_every_other_round_goes_backwards(monkeypatch):
    order = []

    def seconds(model, ids):
        order.append(model)
        return float(len(order))

    monkeypatch.setattr(speed, "seconds", seconds)
    times = speed.interleaved({"exact": "e", "filled": "f"}, prompt(), 3)
    assert order == ["e", "f", "f", "e", "e", "f"]
    assert times == {"exact": [1.0, 4.0, 5.0], "filled": [2.0, 3.0, 6.0]}


def test_the_newest_filled_graph_is_found():
    graphs = [GraphReport(filled=True, rows=8), GraphReport(filled=True, rows=9), GraphReport(reason="decode")]
    assert speed.filled_graph(graphs).rows == 9
    with pytest.raises(RidgefillError, match="too short"):
        speed.filled_graph([GraphReport(rows=3, reason="too short"), GraphReport(reason="decode step")])
    with pytest.raises(RidgefillError, match="no prompt was compiled"):
        speed.filled_graph([])
