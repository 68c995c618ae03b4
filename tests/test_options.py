"""Options are checked before anything runs, and a refusal names the option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ridgefill_compile.errors import OptionError, RidgefillError
from ridgefill_compile.options import DUMP_VARIABLE, INNER_COMPILERS, ROUTES, Options
from tests.toys import random_maps

FINE: dict[str, Any] = {"route": "identity", "split": 1}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tali": 16}, r"unknown option 'tali'; did you mean 'tail'\?"),
        ({"min_fil": 16}, r"unknown option 'min_fil'; did you mean 'min_fill'\?"),
        ({"quantisation": True}, r"unknown option 'quantisation'; known: check_weights, dump, .*, verify"),
        ({3: True}, "unknown option 3"),
        ({"route": "rigde"}, "'route' must be one of 'exact', 'lossless', 'none', .*, 'oracle', not 'rigde'"),
        ({"route": ["exact"]}, "option 'route' must be one of"),
        ({"inner": "tvm"}, "option 'inner' must be one of 'inductor', 'eager', 'aot_eager', not 'tvm'"),
        ({"tail": 0}, "option 'tail' must be a whole number of at least 1, not 0"),
        ({"tail": -5}, "option 'tail'"),
        ({"tail": 512.0}, "option 'tail' must be a whole number"),
        ({"tail": "512"}, "option 'tail' must be a whole number"),
        ({"tail": True}, "option 'tail' must be a whole number"),
        ({"tail": None}, "option 'tail' must be a whole number"),
        ({"min_fill": 0}, "option 'min_fill' must be a whole number of at least 1"),
        ({"split": -1}, "option 'split' must be a whole number of at least 0"),
        ({"split": 1.5}, "option 'split' must be a whole number"),
        ({"value_rescale": -1}, "option 'value_rescale' must be a whole number of at least 0, not -1"),
        ({"value_rescale": 0.5}, "option 'value_rescale' must be a whole number"),
        ({"key_rescale": True}, "option 'key_rescale' must be a whole number"),
        ({"key_rescale": 9, "tail": 8}, "option 'key_rescale' is 9 rows of a tail of 8"),
        ({"state_correction": -0.5}, "option 'state_correction' must be a finite number of at least 0, not -0.5"),
        ({"state_correction": float("nan")}, "option 'state_correction' must be a finite number"),
        ({"state_correction": True}, "option 'state_correction' must be a finite number"),
        ({"state_correction": 1.0}, "option 'state_correction' corrects what maps predict, and route 'identity'"),
        ({"state_correction": 1, "route": "oracle"}, r"needs maps that ridgefill_compile.calibrate_states\(...\) gave"),
        (
            {"state_correction": 1, "route": "oracle", "maps": "maps", "min_fill": 63},
            "whole tiles of 64 filled rows: 'min_fill' must be at least 64, not 63",
        ),
        ({"first_rows": -1}, "option 'first_rows' must be a whole number of at least 0, not -1"),
        ({"first_rows": 9, "min_fill": 8}, "option 'first_rows' is 9, and 'min_fill' lets a prefix have 8 rows"),
        (
            {"first_rows": 1, "route": "lossless"},
            "option 'first_rows' is about rows of a fill, .* 'lossless' fills none",
        ),
        ({"splice": "queries"}, "option 'splice' must be one of 'keys', 'values', 'both', 'key_norms', not 'queries'"),
        ({"splice": "keys", "route": "none"}, "option 'splice' corrects filled states, and route 'none' has none"),
        ({"value_rescale": 8, "route": "lossless"}, "option 'value_rescale' corrects filled states, .* 'lossless'"),
        ({"strict": 1}, "option 'strict' must be True or False, not 1"),
        ({"verify": "yes"}, "option 'verify' must be True or False"),
        ({"check_weights": None}, "option 'check_weights' must be True or False"),
        ({"eliminate": 0}, "option 'eliminate' must be True or False"),
        ({"dump": 3}, "option 'dump' must be text, not 3"),
        ({"mode": 3}, "option 'mode' must be text, not 3"),
        ({"mode": "fastest"}, "option 'mode' must be one of 'default', .*'max-autotune'.*, not 'fastest'"),
        ({"maps": 3}, "option 'maps' must be a directory or RidgeMaps, not 3"),
        ({"mode": "max-autotune", "inner": "eager"}, "option 'mode' is Inductor's; it cannot go with inner='eager'"),
        ({"route": "ridge"}, r"route 'ridge' needs maps: .* or choose route='identity', 'none' or 'exact'"),
        ({"route": "none", "split": None}, r"route 'none' needs a split"),
        ({"route": "oracle", "split": None}, r"route 'oracle' needs a split"),
    ],
)
def test_bad_options_are_refused_by_name(given: dict[Any, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says) as refused:
        Options.parse(FINE | given)
    assert isinstance(refused.value, RidgefillError)
    assert isinstance(refused.value, ValueError)


def test_nothing_given_asks_for_maps() -> None:
    with pytest.raises(OptionError, match="needs maps"):
        Options.parse(None)
    with pytest.raises(OptionError, match="needs maps"):
        Options.parse({})


def test_every_choice_is_taken() -> None:
    for route in ROUTES:
        assert Options.parse({"route": route, "maps": random_maps(8)}).route == route
    for inner in INNER_COMPILERS:
        assert Options.parse(FINE | {"inner": inner}).inner == inner


def test_maps_bring_their_split() -> None:
    assert Options.parse({"route": "identity", "maps": "somewhere"}).split is None
    assert Options.parse({"maps": Path("somewhere"), "split": 3}).split == 3


def test_mode_may_come_from_either_side_but_not_from_both() -> None:
    assert Options.parse(FINE, mode="max-autotune").mode == "max-autotune"
    assert Options.parse(FINE | {"mode": "max-autotune"}).mode == "max-autotune"
    assert Options.parse(FINE | {"mode": "max-autotune"}, mode="max-autotune").mode == "max-autotune"
    with pytest.raises(OptionError, match=r"mode given twice: 'default' and .* 'max-autotune'"):
        Options.parse(FINE | {"mode": "max-autotune"}, mode="default")


def test_dump_comes_from_the_environment_unless_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(DUMP_VARIABLE, raising=False)
    assert Options.parse(FINE).dump is None
    monkeypatch.setenv(DUMP_VARIABLE, str(tmp_path))
    assert Options.parse(FINE).dump == str(tmp_path)
    assert Options.parse(FINE | {"dump": tmp_path / "other"}).dump == str(tmp_path / "other")
    monkeypatch.setenv(DUMP_VARIABLE, "")
    assert Options.parse(FINE).dump is None


def test_the_users_mapping_is_left_alone() -> None:
    given = dict(FINE)
    Options.parse(given, mode="default")
    assert given == FINE
