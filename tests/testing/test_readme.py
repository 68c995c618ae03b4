"""The worked examples of the README run, and find what it says."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from ridgefill_compile.testing import Mismatch

README = Path(__file__).parents[2] / "README.md"
SECTION = README.read_text().partition("## Test your own graph rewrite")[2].partition("\n## ")[0]
REWRITE, RULE = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)


def test_the_example_finds_its_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shown,) = re.findall(r"```text\n(.*?)```", SECTION, re.DOTALL)
    file = tmp_path / "test_merge.py"
    file.write_text(REWRITE)
    spec = importlib.util.spec_from_file_location("test_merge", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "test_merge", module)
    spec.loader.exec_module(module)
    with pytest.raises(Mismatch) as caught:
        module.test_merging_changes_nothing()
    assert str(caught.value).strip() == shown.strip()
    with pytest.raises(Mismatch) as again:
        exec(caught.value.source, {})
    assert str(again.value) == str(caught.value)


def test_the_rule_is_right_of_one_op_and_wrong_of_another() -> None:
    given, wrong, own = RULE.rpartition("check_rule(torch.ops.aten.cumsum.default, by_row)")
    names: dict[str, Any] = {}
    exec(given, names)
    with pytest.raises(Mismatch, match="wanted: last 1 of dim 0"):
        exec(wrong, names)
    exec(own, names)
