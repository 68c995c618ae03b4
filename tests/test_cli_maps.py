"""`ridgefill maps`: dtype and size, and conversion to another dtype."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ridgefill_compile import cli
from ridgefill_compile.maps import RidgeMaps
from tests.test_maps import assert_same, maps_of

RUN = CliRunner()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    maps_of().save(tmp_path / "maps")
    return tmp_path / "maps"


def test_dtype_and_bytes_are_told(saved):
    told = json.loads(RUN.invoke(cli.app, ["maps", str(saved), "--json"]).stdout)
    assert told["dtype"] == "bfloat16"
    one = 2 * (8 * 8 + 8)
    assert told["bytes"] == 3 * one
    assert [part["bytes"] for part in told["splits"]] == [2 * one, one]
    assert "stored as bfloat16, 0.0 MB" in RUN.invoke(cli.app, ["maps", str(saved)]).stdout.replace("\n", " ")


@pytest.mark.parametrize("place", ["converted", "maps"])
def test_conversion(saved, place):
    out = saved.with_name(place)
    expected = maps_of().to("int8")
    found = RUN.invoke(cli.app, ["maps", str(saved), "--dtype", "int8", "--out", str(out), "--json"])
    told = json.loads(found.stdout)
    assert (told["saved"], told["dtype"], told["bytes"]) == (str(out), "int8", 3 * (8 * 8 + 2 * 8 + 2 * 8))
    assert_same(RidgeMaps.load(out), expected)
    shown = RUN.invoke(cli.app, ["maps", str(out)]).stdout
    assert "of the bfloat16 maps they were converted from" in shown


@pytest.mark.parametrize("options", [["--dtype", "int8"], ["--out", "other"], ["--dtype", "int4", "--out", "other"]])
def test_half_a_conversion_is_an_error(saved, options, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = RUN.invoke(cli.app, ["maps", str(saved), *options])
    assert found.exit_code == 1
    assert "OptionError" in found.stderr
    assert not Path("other").exists()
