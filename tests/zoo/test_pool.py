"""Many checks in processes: what becomes of those that crash or hang, and how an interrupted run goes on."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from ridgefill_compile.zoo.check import Verdict
from ridgefill_compile.zoo.pool import check_types


def pretend(kind: str, quick: bool, dtype: str) -> Verdict:
    """A check that does what its type is called."""
    if kind == "crash":
        os._exit(9)
    if kind == "hang":
        time.sleep(600)
    if kind == "raise":
        raise ValueError("no")
    print("a library speaks")
    return Verdict(kind, built=True, sound=True, notes=["quick"] if quick else [])


def test_a_crash_and_a_hang_are_rows(capfd) -> None:
    found = {v.type: v for v in check_types(["crash", "hang", "raise", "good"], jobs=4, seconds=20.0, check=pretend)}
    assert found["good"].sound
    assert not any(found[kind].sound for kind in ("crash", "hang", "raise"))
    assert found["crash"].reason == "the process ended with exit code 9"
    assert found["hang"].reason == "took longer than 20 s"
    assert found["raise"].reason == "the process ended with exit code 1"
    assert capfd.readouterr().out == ""


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    kept = tmp_path / "zoo.jsonl"
    first = list(check_types(["good", "better"], jobs=2, quick=True, resume=kept, check=pretend))
    assert {json.loads(line)["type"] for line in kept.read_text().splitlines()} == {"good", "better"}
    with kept.open("a") as file:
        file.write('{"type": "hang", "bui')  # cut off
    again = list(check_types(["good", "best"], quick=True, resume=kept, check=pretend))
    assert [v.type for v in again] == ["good", "best"]
    assert again[0] == next(v for v in first if v.type == "good")
    assert [v.type for v in check_types(["best", "good"], quick=True, resume=kept, check=pretend)] == ["best", "good"]


def test_what_was_checked_otherwise_is_checked_again(tmp_path: Path) -> None:
    """Less thoroughly, or in another dtype."""
    kept = tmp_path / "zoo.jsonl"
    for how in ({"quick": True}, {}, {"quick": True}, {"dtype": "bfloat16"}, {"quick": True, "dtype": "bfloat16"}):
        (found,) = check_types(["good"], resume=kept, check=pretend, **how)
        assert found.sound
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [(line["quick"], line["dtype"]) for line in lines] == [
        (True, "float32"),
        (False, "float32"),
        (False, "bfloat16"),
    ]
