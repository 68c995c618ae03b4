"""The demo's flow on a tiny model, and its promises about names and values."""

import io
import json
import subprocess
import sys

import pytest
from rich.console import Console

from ridgefill_compile import demo
from ridgefill_compile.demo import DemoSettings
from ridgefill_compile.errors import OptionError
from ridgefill_compile.evaluate.texts import Window
from ridgefill_compile.maps import RidgeMaps
from tests.evaluate.tiny import made_up_texts, tiny_maps, tiny_model, tiny_tokenizer

PROMISED = {
    "ttft_exact_s",
    "ttft_filled_s",
    "speedup",
    "ceiling_layer_passes",
    "ceiling_multiply_adds",
    "rows",
    "tail",
    "split",
    "delta_nll",
    "top1_agreement",
    "answer_exact",
    "answer_filled",
    "machine",
    "dtype",
    "versions",
}
SMALL = DemoSettings(
    split=2,
    tail=32,
    rows=400,
    runs=1,
    held_out_windows=2,
    held_out_rows=330,
    scored=16,
    question_rows=330,
    new_tokens=3,
)


@pytest.fixture(scope="module")
def result():
    found = demo.demonstrate(tiny_model(), tiny_tokenizer(), tiny_maps(), made_up_texts(), SMALL, inner="eager")
    return {"model": "tiny", **found, "picture": "demo.png", "total_s": 1.0}


@pytest.mark.slow
def test_the_result_keeps_its_promises(result):
    assert result.keys() >= PROMISED
    assert result["delta_nll"].keys() == {"none", "identity", "ridge"}
    assert (result["rows"], result["tail"], result["split"]) == (400, 32, 2)
    assert json.loads(json.dumps(result)) == result
    assert [asked["fact"] is None for asked in result["questions"]] == [True, False]
    assert result["answer_filled"] == result["questions"][0]["filled"]


@pytest.mark.slow
def test_it_is_shown_with_every_figure(result):
    output = io.StringIO()
    demo.show(result, Console(file=output, width=200))
    shown = output.getvalue()
    assert f"{result['speedup']:.2f}x" in shown
    assert f"{result['ceiling_multiply_adds']:.2f}x" in shown
    assert f"{result['delta_nll']['ridge']:.3f}" in shown
    for asked in result["questions"]:
        assert asked["question"] in shown


@pytest.mark.heavy
def test_the_demo_on_the_real_model(tmp_path):
    command = ["-m", "ridgefill_compile.cli", "demo", "--json", "--picture", str(tmp_path / "demo.png")]
    output = subprocess.run([sys.executable, *command], check=True, stdout=subprocess.PIPE, text=True).stdout
    result = json.loads(output)
    assert result.keys() >= PROMISED
    loss = result["delta_nll"]
    assert loss["ridge"] < loss["identity"] < loss["none"]
    assert loss["ridge"] < 0.32  # twice an independent implementation's
    assert 1.3 < result["speedup"] < 1.1 * result["ceiling_layer_passes"]
    assert (tmp_path / "demo.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("wrong", "says"),
    [({"runs": 0}, "runs"), ({"scored": 513}, "scored"), ({"rows": 512}, "prefix"), ({"question_rows": 100}, "prefix")],
)
def test_settings_are_checked(wrong, says):
    with pytest.raises(OptionError, match=says):
        DemoSettings(**wrong)


def test_maps_are_calibrated_once(monkeypatch, tmp_path):
    monkeypatch.setenv("RIDGEFILL_CACHE", str(tmp_path))
    asked = []

    def calibrate(model, ids, **how):
        asked.append(how["splits"])
        return tiny_maps()

    monkeypatch.setattr(demo, "calibrate", calibrate)
    model, tokenizer = tiny_model(), tiny_tokenizer()
    windows = [Window("a", "prose", tokenizer("row tail map", return_tensors="pt")["input_ids"])]
    for _ in range(2):
        maps = demo.demo_maps(model, tokenizer, "digest", windows, 2)
        assert isinstance(maps, RidgeMaps)
    demo.demo_maps(model, tokenizer, "other", windows, 2)
    assert asked == [(2,), (2,)]
