"""The worked example of the README runs, and finds what it says."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from ridgefill_compile.testing import Mismatch

README = Path(__file__).parents[2] / "README.md"


def test_the_example_finds_its_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = README.read_text().partition("## Test your own graph rewrite")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", section, re.DOTALL)
    file = tmp_path / "test_merge.py"
    file.write_text(code)
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
