from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ridgefill_compile.checkpoint import FILE, Checkpoint, SumsSoFar
from ridgefill_compile.errors import CalibrationError
from ridgefill_compile.ridge import RidgeStatistics

CPU = torch.device("cpu")
SETTINGS = {"splits": (1, 2), "window": 64}


def state(documents: int = 3) -> SumsSoFar:
    generator = torch.Generator().manual_seed(documents)
    x, y = torch.randn(2, 10, 4, generator=generator)
    by_split = {split: RidgeStatistics.from_rows(split, x, {3: y, 4: x}) for split in (1, 2)}
    return SumsSoFar(documents, f"digest {documents}", by_split)


def assert_same(got: SumsSoFar | None, expected: SumsSoFar) -> None:
    assert got is not None
    assert (got.documents, got.digest) == (expected.documents, expected.digest)
    assert got.by_split.keys() == expected.by_split.keys()
    for split, sums in expected.by_split.items():
        stored = got.by_split[split].to_tensors()
        assert stored.keys() == sums.to_tensors().keys()
        assert all(torch.equal(stored[name], tensor) for name, tensor in sums.to_tensors().items())


def test_round_trip_and_replacement(tmp_path):
    checkpoint = Checkpoint(tmp_path / "deep" / "er", SETTINGS)
    assert checkpoint.load(CPU) is None
    for documents in (1, 2):
        checkpoint.save(state(documents))
        assert_same(Checkpoint(tmp_path / "deep" / "er", SETTINGS).load(CPU), state(documents))


def test_size_does_not_depend_on_the_documents(tmp_path):
    checkpoint = Checkpoint(tmp_path, SETTINGS)
    sizes = set()
    for documents in (1, 5, 9):
        checkpoint.save(state(documents))
        sizes.add(checkpoint.path.stat().st_size)
    assert len(sizes) == 1


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"splits": (1,), "window": 64}, r"made with splits=\[1, 2\], now splits=\[1\]"),
        ({"splits": (1, 2), "window": 32}, "made with window=64, now window=32"),
        ({"splits": (1, 2), "window": 64, "stride": 2}, "made with stride=None, now stride=2"),
        ({"splits": (1, 3), "window": 32}, r"splits=\[1, 2\], window=64, now splits=\[1, 3\], window=32"),
    ],
)
def test_other_settings_are_refused_and_the_checkpoint_kept(tmp_path, settings, says):
    Checkpoint(tmp_path, SETTINGS).save(state())
    with pytest.raises(CalibrationError, match=says):
        Checkpoint(tmp_path, settings).load(CPU)
    assert_same(Checkpoint(tmp_path, SETTINGS).load(CPU), state())


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_file_is_refused(tmp_path, keep):
    checkpoint = Checkpoint(tmp_path, SETTINGS)
    checkpoint.save(state())
    checkpoint.path.write_bytes(checkpoint.path.read_bytes()[:keep])
    with pytest.raises(CalibrationError, match=r"cannot be read .*delete it to start anew"):
        checkpoint.load(CPU)


def test_foreign_files_are_refused(tmp_path):
    from safetensors.torch import save_file

    checkpoint = Checkpoint(tmp_path, SETTINGS)
    for tensors, metadata in (({"a": torch.ones(2)}, None), ({"a": torch.ones(2)}, {"calibration": "{}"})):
        save_file(tensors, checkpoint.path, metadata)
        with pytest.raises(CalibrationError, match="cannot be read"):
            checkpoint.load(CPU)
    torch.save({"a": 1}, checkpoint.path)
    with pytest.raises(CalibrationError, match="cannot be read"):
        checkpoint.load(CPU)


@pytest.mark.parametrize("step", ["fsync", "rename"])
def test_save_that_fails_keeps_the_one_before(tmp_path, monkeypatch, step):
    checkpoint = Checkpoint(tmp_path, SETTINGS)
    checkpoint.save(state(1))

    def fail(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(*((os, "fsync") if step == "fsync" else (Path, "replace")), fail)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(state(2))
    assert_same(checkpoint.load(CPU), state(1))
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_remove_leaves_what_others_put_there(tmp_path):
    checkpoint = Checkpoint(tmp_path / "own", SETTINGS)
    checkpoint.save(state())
    checkpoint.remove()
    assert not (tmp_path / "own").exists()
    checkpoint.save(state())
    (tmp_path / "own" / "notes.txt").touch()
    checkpoint.remove()
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["notes.txt"]
