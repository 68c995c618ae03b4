"""Maps on the Hub, which is played by a folder: what the client is asked for, and what is said when it fails."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors

from ridgefill_compile.card import model_card
from ridgefill_compile.errors import MapsError, RidgefillWarning
from ridgefill_compile.mapfiles import MANIFEST
from ridgefill_compile.maps import RidgeMaps, SplitMaps
from tests.test_fingerprint import Characters, decoder
from tests.test_maps import assert_same, maps_of, tensor_files


class FakeHub:
    """One repository in a folder; fails with `error` if that is set."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.error: Exception | None = None

    def answer(self, name: str, **given: Any) -> None:
        self.calls.append((name, given))
        if self.error is not None:
            raise self.error

    def snapshot_download(self, repo_id: str, **given: Any) -> str:
        self.answer("snapshot_download", repo_id=repo_id, **given)
        return str(self.root)

    def create_repo(self, api: Any, repo_id: str, **given: Any) -> SimpleNamespace:
        self.answer("create_repo", repo_id=repo_id, token=api.token, **given)
        return SimpleNamespace(repo_id=repo_id if "/" in repo_id else f"me/{repo_id}")

    def create_branch(self, api: Any, repo_id: str, **given: Any) -> None:
        self.answer("create_branch", repo_id=repo_id, token=api.token, **given)

    def upload_folder(self, api: Any, *, folder_path: str, **given: Any) -> None:
        self.answer("upload_folder", token=api.token, **given)
        shutil.copytree(folder_path, self.root)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path / "repository")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    for name in ("create_repo", "create_branch", "upload_folder"):
        method = getattr(fake, name)
        monkeypatch.setattr(
            huggingface_hub.HfApi, name, lambda api, *args, _do=method, **given: _do(api, *args, **given)
        )
    monkeypatch.chdir(tmp_path)
    return fake


def refused(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    """An answer of the Hub, as the client raises it."""
    error = kind.__new__(kind)
    Exception.__init__(error, "\nthe Hub says no\nfor long reasons")
    error.response = SimpleNamespace(status_code=status)  # type: ignore[assignment]
    return error


class TestPush:
    def test_the_directory_and_a_card_are_uploaded(self, fake, tmp_path):
        assert maps_of().push_to_hub("someone/maps") == "someone/maps"
        assert fake.calls == [
            ("create_repo", {"repo_id": "someone/maps", "token": None, "private": None, "exist_ok": True}),
            (
                "upload_folder",
                {
                    "token": None,
                    "repo_id": "someone/maps",
                    "commit_message": "Upload ridge maps",
                    "revision": None,
                    "delete_patterns": "split-*.safetensors",
                },
            ),
        ]
        maps_of().save(tmp_path / "saved")
        expected = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
        expected["README.md"] = model_card(maps_of(), "someone/maps").encode()
        assert {path.name: path.read_bytes() for path in fake.root.iterdir()} == expected

    def test_options_are_passed_on_and_the_full_name_comes_back(self, fake):
        options: dict[str, Any] = {"private": True, "token": "hf_mine", "commit_message": "again", "revision": "eight"}
        assert maps_of().push_to_hub("maps", **options) == "me/maps"
        created, branched, uploaded = (given for _, given in fake.calls)
        assert (created["private"], branched["branch"], uploaded["revision"]) == (True, "eight", "eight")
        assert uploaded["commit_message"] == "again"
        assert {given["token"] for _, given in fake.calls} == {"hf_mine"}
        assert {branched["repo_id"], uploaded["repo_id"]} == {"me/maps"}
        assert 'from_pretrained("me/maps"' in (fake.root / "README.md").read_text()

    def test_a_pull_request_is_no_branch_to_make(self, fake):
        maps_of().push_to_hub("someone/maps", revision="refs/pr/3")
        assert [name for name, _ in fake.calls] == ["create_repo", "upload_folder"]

    @pytest.mark.parametrize(
        ("error", "says"),
        [
            (errors.HFValidationError("no such form"), "'someone/maps' cannot be the name of a repository: no such"),
            (errors.LocalTokenNotFoundError("none"), "does not let you write to someone/maps: log in .*token="),
            (refused(errors.HfHubHTTPError, 403), "does not let you write to someone/maps: log in"),
            (refused(errors.RepositoryNotFoundError, 401), "does not let you write to someone/maps: log in"),
            (refused(errors.HfHubHTTPError, 500), "refuses the maps for someone/maps: the Hub says no$"),
            (errors.OfflineModeIsEnabled("offline"), r"not pushed to someone/maps \(offline\): try again online"),
            (ConnectionError(), r"not pushed to someone/maps \(ConnectionError\): try again online"),
        ],
    )
    def test_what_stands_in_the_way_is_said(self, fake, error, says):
        fake.error = error
        with pytest.raises(MapsError, match=says) as caught:
            maps_of().push_to_hub("someone/maps")
        assert caught.value.__cause__ is error


class TestFromPretrained:
    @pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
    def test_what_was_pushed_comes_back(self, fake, dtype):
        maps = maps_of().to(dtype)
        source = maps.push_to_hub("someone/maps")
        fake.calls.clear()
        assert_same(RidgeMaps.from_pretrained(source), maps)
        assert fake.calls == [
            (
                "snapshot_download",
                {
                    "repo_id": "someone/maps",
                    "revision": None,
                    "token": None,
                    "cache_dir": None,
                    "local_files_only": False,
                    "allow_patterns": [MANIFEST, "split-*.safetensors"],
                },
            )
        ]

    def test_options_are_passed_on(self, fake):
        maps_of().save(fake.root)
        options: dict[str, Any] = {"revision": "v2", "token": "hf_x", "cache_dir": "kept", "local_files_only": True}
        RidgeMaps.from_pretrained("someone/maps", **options)
        assert fake.calls[0][1].items() >= options.items()

    @pytest.mark.parametrize("form", [str, Path])
    def test_a_directory_is_loaded_and_nobody_asked(self, fake, tmp_path, form):
        maps_of().save("some/maps")
        for source in ("some/maps", "./some/maps", "some/maps/", tmp_path / "some" / "maps"):
            assert_same(RidgeMaps.from_pretrained(form(source)), maps_of())
        assert not fake.calls

    @pytest.mark.parametrize("source", ["maps", "./maps", "../maps", "some/maps/", "/some/maps", "some/more/maps", ""])
    def test_what_can_only_be_a_directory_is_not_asked_for(self, fake, source):
        with pytest.raises(MapsError, match=f"no maps in .*there is no {MANIFEST}"):
            RidgeMaps.from_pretrained(source)
        assert not fake.calls

    def test_model_and_tokenizer_are_checked(self, fake):
        maps_of().save(fake.root)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            RidgeMaps.from_pretrained("someone/maps", model=decoder(), tokenizer=Characters())
        with pytest.warns(RidgefillWarning, match="maps in someone/maps were calibrated on other weights") as caught:
            RidgeMaps.from_pretrained("someone/maps", model=decoder(seed=3))
        assert caught[0].filename == __file__
        with pytest.warns(RidgefillWarning, match="maps in someone/maps were .* another tokenizer"):
            RidgeMaps.from_pretrained("someone/maps", tokenizer=Characters(shift=1))
        with pytest.raises(MapsError, match="maps in someone/maps are of a model of"):
            RidgeMaps.from_pretrained("someone/maps", model=decoder(width=12))

    @pytest.mark.parametrize(
        ("error", "says"),
        [
            (
                refused(errors.RepositoryNotFoundError, 404),
                "no directory someone/maps, and no repository of that name .*log in",
            ),
            (refused(errors.GatedRepoError, 403), "someone/maps on the Hub is gated: ask for access"),
            (refused(errors.RevisionNotFoundError, 404), "someone/maps on the Hub has no revision 'v2'"),
            (
                errors.LocalEntryNotFoundError("none"),
                "no directory someone/maps, .*cannot be reached: try again online",
            ),
            (errors.OfflineModeIsEnabled("none"), "no directory someone/maps, .*cannot be reached"),
            (refused(errors.HfHubHTTPError, 500), "someone/maps cannot be fetched from the Hub: the Hub says no$"),
            (OSError("disk full"), "someone/maps cannot be fetched from the Hub: disk full"),
        ],
    )
    def test_what_stands_in_the_way_is_said(self, fake, error, says):
        fake.error = error
        with pytest.raises(MapsError, match=says) as caught:
            RidgeMaps.from_pretrained("someone/maps", revision="v2")
        assert caught.value.__cause__ is error

    def test_only_the_cache_may_be_asked_and_holds_none(self, fake):
        fake.error = errors.LocalEntryNotFoundError("none")
        with pytest.raises(MapsError, match="no such repository in the Hub's cache; allow its download once"):
            RidgeMaps.from_pretrained("someone/maps", local_files_only=True)

    def test_a_repository_without_maps(self, fake):
        fake.root.mkdir()
        with pytest.raises(MapsError, match=f"someone/maps on the Hub holds no maps: there is no {MANIFEST}"):
            RidgeMaps.from_pretrained("someone/maps")

    def test_a_damaged_one_says_where_it_lies(self, fake):
        maps_of().save(fake.root)
        tensor_files(fake.root)[0].write_bytes(b"short")
        with pytest.raises(MapsError, match=f"someone/maps on the Hub: .*truncated.* delete {fake.root}$"):
            RidgeMaps.from_pretrained("someone/maps")

    def test_the_client_itself_raises_what_is_caught(self, tmp_path):
        with pytest.raises(MapsError, match="no such repository in the Hub's cache"):
            RidgeMaps.from_pretrained("someone/maps", local_files_only=True, cache_dir=tmp_path)


class TestCard:
    def test_says_what_the_maps_are(self):
        maps = maps_of(calibration={"model": "LlamaForCausalLM"})
        card = model_card(maps, "someone/maps")
        read = huggingface_hub.ModelCard(card)
        facts, body = read.data.to_dict(), read.text
        assert facts["library_name"] == "ridgefill-compile"
        assert {"ridgefill", "torch.compile"} <= set(facts["tags"])
        assert "# Ridge maps of LlamaForCausalLM of 4 layers, width 8" in body
        assert 'from_pretrained("someone/maps", model=model' in body
        assert "Stored as bfloat16, 0.0 MB.\n" in body
        assert "| 1 | 2 to 3 | 1024 | 0.03 | 0 | 0.9250 | 0.5000 |" in body
        assert "| 2 (default) | 3 to 3 | 1024 | 0.03 | 0 | 0.9300 | 0.5000 |" in body
        assert "Stored as int8, 0.0 MB; the figures are of the bfloat16 maps" in model_card(maps.to("int8"), "a/b")

    def test_of_maps_without_figures(self):
        bare = SplitMaps(1, {2: torch.eye(3)}, {2: torch.zeros(3)})
        card = model_card(RidgeMaps([bare], layer_count=3), "someone/maps")
        assert "Ridge maps of a decoder of 3 layers" in card
        assert "| 1 (default) | 2 to 2 | 0 | 0 | 0 |  |  |" in card
