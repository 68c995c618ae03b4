"""The command line: what it prints where, and how it fails."""

import json

import pytest
import torch
from typer.testing import CliRunner

from ridgefill_compile import cli
from ridgefill_compile.errors import RidgefillWarning
from ridgefill_compile.evaluate.arms import CORRECTED
from tests.decoders import RECURRENT
from tests.evaluate.tiny import made_up_text, tiny_maps, tiny_model, tiny_tokenizer

RUN = CliRunner()


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text(made_up_text(str(number), 4000))
    return folder


@pytest.mark.parametrize("command", ["demo", "calibrate", "eval", "maps"])
def test_every_command_explains_itself(command):
    found = RUN.invoke(cli.app, [command, "--help"])
    assert found.exit_code == 0
    assert "--json" in found.output


def test_demo_passes_its_options_on_and_prints_one_object(monkeypatch):
    given = []

    def run(settings, picture):
        print("a library speaks")
        given.append((settings, picture))
        return {"speedup": 1.5}

    monkeypatch.setattr(cli, "run_demo", run)
    found = RUN.invoke(cli.app, ["demo", "--json", "--rows", "2048", "--split", "11", "--picture", "a.png"])
    assert json.loads(found.stdout) == {"speedup": 1.5}
    assert "a library speaks" in found.stderr
    settings, picture = given[0]
    assert (settings.rows, settings.split, settings.tail, picture.name) == (2048, 11, 512, "a.png")


def test_bad_settings_are_one_line_on_stderr():
    found = RUN.invoke(cli.app, ["demo", "--rows", "100"])
    assert found.exit_code == 1
    assert found.stdout == ""
    assert found.stderr.startswith("error: OptionError: a prompt of 100 rows")
    assert "Traceback" not in found.stderr


def test_an_unknown_option_is_a_usage_error():
    found = RUN.invoke(cli.app, ["demo", "--rowz", "100"])
    assert found.exit_code == 2
    assert "--rowz" in found.stderr


def test_maps_are_described(tmp_path):
    tiny_maps().save(tmp_path / "maps")
    told = json.loads(RUN.invoke(cli.app, ["maps", str(tmp_path / "maps"), "--json"]).stdout)
    assert (told["split"], told["layer_count"], told["width"]) == (2, 4, 32)
    assert told["splits"][0]["layers"] == [3]
    shown = RUN.invoke(cli.app, ["maps", str(tmp_path / "maps")])
    assert "(default)" in shown.stdout


def test_damaged_maps_are_an_error(tmp_path):
    tiny_maps().save(tmp_path / "maps")
    file = next((tmp_path / "maps").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    found = RUN.invoke(cli.app, ["maps", str(tmp_path / "maps"), "--json"])
    assert found.exit_code == 1
    assert found.stdout == ""
    assert "MapsError" in found.stderr


def test_calibrate_then_evaluate_on_own_text(model, text, tmp_path):
    out = tmp_path / "maps"
    arguments = ["calibrate", str(model), "--out", str(out), "--split", "1", "--split", "2", "--text", str(text)]
    found = RUN.invoke(cli.app, [*arguments, "--window", "64", "--held-out", "1", "--json"])
    assert found.exit_code == 0, found.stderr
    told = json.loads(found.stdout)
    assert [part["split"] for part in told["splits"]] == [1, 2]
    assert told["saved"] == str(out)
    arguments = ["eval", str(model), str(out), "--split", "2", "--text", str(text), "--rows", "400", "--tail", "32"]
    found = RUN.invoke(cli.app, [*arguments, "--windows", "2", "--scored", "16", "--json"])
    assert found.exit_code == 0, found.stderr
    told = json.loads(found.stdout)
    assert told["split"] == 2
    assert told["arms"].keys() == {"none", "none_longer_tail", "identity", "ridge"}
    assert 32 < told["longer_tail"] < 400


@pytest.mark.heavy
def test_calibrate_states_too_and_evaluate_with_them_corrected(tmp_path, text):
    """In one command, on texts of their own."""
    model, out = tmp_path / "hybrid", tmp_path / "maps"
    hybrid = RECURRENT["qwen3_next"].build()
    for name, parameter in hybrid.named_parameters():
        if name.endswith("A_log"):  # states that last
            torch.nn.init.constant_(parameter, -5.0)
    hybrid.save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    arguments = ["calibrate", str(model), "--out", str(out), "--split", "1", "--text", str(text), "--window", "128"]
    with pytest.warns(RidgefillWarning, match="means over .* prompts"):
        found = RUN.invoke(cli.app, [*arguments, "--held-out", "1", "--states", "1", "--json"])
    assert found.exit_code == 0, found.stderr
    told = json.loads(found.stdout)
    assert told["splits"][0]["states"]
    assert told["calibration"]["documents"] == 1  # of three, one is held out and one set apart
    assert "state_correction can be used at split 1" in RUN.invoke(cli.app, ["maps", str(out)]).stdout
    arguments = ["eval", str(model), str(out), "--text", str(text), "--rows", "400", "--tail", "64", "--windows", "1"]
    with pytest.warns(RidgefillWarning, match="no arm without a fill: .* layer 2 has none"):
        found = RUN.invoke(cli.app, [*arguments, "--scored", "16", "--json"])
    assert found.exit_code == 0, found.stderr
    arms = json.loads(found.stdout)["arms"]
    assert tuple(arms) == ("identity", "ridge", CORRECTED)
    assert arms[CORRECTED] != arms["ridge"]


def test_calibrating_on_nothing_is_an_error(model, tmp_path):
    arguments = ["calibrate", str(model), "--out", str(tmp_path / "maps"), "--split", "1"]
    found = RUN.invoke(cli.app, [*arguments, "--text", str(tmp_path / "none")])
    assert found.exit_code == 1
    assert "does not exist" in found.stderr
    assert not (tmp_path / "maps").exists()
