from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ridgefill_compile.atomic import replace_file


def writing(content: str) -> Callable[[Path], None]:
    def write(aside: Path) -> None:
        aside.write_text(content)

    return write


def test_creates_and_replaces(tmp_path):
    path = tmp_path / "file"
    for content in ("one", "two"):
        replace_file(path, writing(content))
        assert path.read_text() == content
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "file"
    path.write_text("old")

    def fail(aside: Path) -> None:
        aside.write_text("ne")
        raise error

    with pytest.raises(error):
        replace_file(path, fail)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_content_reaches_the_disk_before_its_name_does(tmp_path, monkeypatch):
    """Renamed first, a power cut could leave a good name on an empty file."""
    path = tmp_path / "file"
    path.write_text("old")
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def record_fsync(descriptor: int) -> None:
        events.append("flush " + Path(f"/proc/self/fd/{descriptor}").resolve().name)
        fsync(descriptor)

    def record_replace(self: Path, target: Path) -> Path:
        events.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "replace", record_replace)
    replace_file(path, writing("new"))
    assert events == ["flush .file.partial", "rename", f"flush {tmp_path.name}"]


def test_others_may_read_what_the_umask_lets_them(tmp_path):
    path = tmp_path / "file"

    def private(aside: Path) -> None:
        aside.unlink()
        aside.touch(mode=0o600)

    before = os.umask(0o022)
    try:
        replace_file(path, private)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644
