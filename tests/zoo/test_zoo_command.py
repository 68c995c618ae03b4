"""`ridgefill zoo` and `ridgefill inspect --check`: what they print where, and how they end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ridgefill_compile import cli
from ridgefill_compile.zoo import pool, shrink
from ridgefill_compile.zoo.check import Verdict
from ridgefill_compile.zoo.tables import counts, state_of
from tests.evaluate.tiny import tiny_model, tiny_tokenizer

RUN = CliRunner()
VERDICTS = {
    "whole": Verdict("whole", True, 1, True, True, True, 4, 3, 1.7),
    "wide": Verdict("wide", True, 1, True, True, False, 4, 3, 1.1, ["aten.foo.default [1, 61] in Bar"]),
    "refused": Verdict("refused", True, 1, True, reason="a recurrent state"),
    "wrong": Verdict("wrong", True, 1, False, True, True, 4, 3, 1.7, reason="lengths: failed: oracle != exact"),
}


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Checks are not run; how they were asked for is kept."""
    calls: list[Any] = []

    def check_types(kinds: Sequence[str], **how: Any) -> Iterator[Verdict]:
        calls.append((list(kinds), how))
        return iter([VERDICTS.get(kind, VERDICTS["whole"]) for kind in kinds])

    monkeypatch.setattr(pool, "check_types", check_types)
    return calls


def test_one_object_a_line(given: list[Any], tmp_path: Path) -> None:
    kept = tmp_path / "zoo.jsonl"
    arguments = ["zoo", "llama", "mamba", "--json", "--jobs", "3", "--quick", "--resume", str(kept), "--limit", "9"]
    arguments += ["--dtype", "bfloat16"]
    found = RUN.invoke(cli.app, arguments)
    assert found.exit_code == 0
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert [Verdict(**line) for line in lines] == [VERDICTS["whole"]] * 2
    assert given == [
        (["llama", "mamba"], {"jobs": 3, "quick": True, "dtype": "bfloat16", "seconds": 9.0, "resume": kept})
    ]


def test_no_such_dtype(given: list[Any]) -> None:
    found = RUN.invoke(cli.app, ["zoo", "llama", "--dtype", "float8"])
    assert found.exit_code == 1
    assert "dtype must be float32, bfloat16 or float16, not 'float8'" in found.stderr
    assert given == []


def test_a_table_and_a_line_of_counts(given: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shrink, "require_decoder", lambda kind: None)
    found = RUN.invoke(cli.app, ["zoo", *VERDICTS], env={"COLUMNS": "200"})
    assert found.exit_code == 1  # one is wrong
    assert all(kind in found.stdout for kind in VERDICTS)
    assert "aten.foo.default [1, 61] in Bar" in found.stdout
    assert "oracle != exact" in found.stdout
    assert found.stdout.splitlines()[-1].startswith("4 types: 3 sound, of which 2 filled (1 of them")


def test_all_types_by_default(given: list[Any]) -> None:
    assert RUN.invoke(cli.app, ["zoo", "--json"]).exit_code == 0
    assert given[0][0] == shrink.model_types()


@pytest.mark.parametrize(("kind", "says"), [("lama", "no model type"), ("musicgen", "decodes audio codebooks")])
def test_no_decoder_is_an_error(given: list[Any], kind: str, says: str) -> None:
    found = RUN.invoke(cli.app, ["zoo", "llama", kind, "--json"])
    assert (found.exit_code, found.stdout, given) == (1, "", [])
    assert says in found.stderr


def test_states() -> None:
    assert [state_of(v) for v in VERDICTS.values()] == ["eliminated", "filled", "exact", "unsound"]
    assert counts([]) == counts(list(VERDICTS.values())).translate(str.maketrans("4321", "0000"))


@pytest.mark.parametrize("weights", [False, True])
def test_inspect_checks_a_copy_or_the_model(tmp_path: Path, weights: bool) -> None:
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    arguments = ["inspect", str(tmp_path), "--check", "--json", "--rows", "64", "--tail", "16"]
    found = RUN.invoke(cli.app, [*arguments, *(["--weights"] if weights else [])])
    assert found.exit_code == 0, found.stderr
    told = json.loads(found.stdout)
    assert (told["sound"], told["filled"], told["eliminated"]) == (True, True, True)
    assert told["calls"] == {"lengths": "ok", "left padding": "ok", "continued": "ok"}
    assert told["layers"][0]["index"] == 0
    assert told["ceiling_multiply_adds"] > 1


def test_inspect_says_what_it_checked(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    found = RUN.invoke(cli.app, ["inspect", str(tmp_path), "--check", "--rows", "64", "--tail", "16"])
    assert found.exit_code == 0, found.stderr
    assert "checked: eliminated, 3 of 4 layers" in found.stdout
    assert "left padding: ok" in found.stdout
