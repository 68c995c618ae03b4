from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ridgefill_compile import mapfiles
from ridgefill_compile.errors import MapsError, OptionError, RidgefillWarning
from ridgefill_compile.fingerprint import ModelFingerprint, tokenizer_fingerprint
from ridgefill_compile.int8 import dequantise
from ridgefill_compile.mapfiles import MANIFEST
from ridgefill_compile.maps import RidgeMaps, SplitMaps
from tests.test_fingerprint import LAYERS, Characters, decoder

WIDTH = 8


def part(split: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16, width: int = WIDTH) -> SplitMaps:
    generator = torch.Generator().manual_seed(seed)
    late = range(split + 1, LAYERS)
    return SplitMaps(
        split=split,
        matrices={layer: torch.randn(width, width, generator=generator).to(dtype) for layer in late},
        offsets={layer: torch.randn(width, generator=generator).to(dtype) for layer in late},
        penalty=0.03,
        rows=1024.0,
        held_out={layer: {"cosine": 0.9 + layer / 100, "identity_cosine": 0.5} for layer in late},
        penalty_cosines={0.01: 0.9, 0.03: 0.91},
    )


def int8_part(changed: Any = None) -> SplitMaps:
    """Of codes, in two groups of columns; with some of its tensors changed."""
    width, late = 200, range(2, LAYERS)
    tensors: dict[str, Any] = {
        "matrices": {layer: torch.full((width, width), layer, dtype=torch.int8) for layer in late},
        "offsets": {layer: torch.zeros(width, dtype=torch.bfloat16) for layer in late},
        "scales": {layer: torch.full((width, 2), 0.5, dtype=torch.bfloat16) for layer in late},
    }
    return SplitMaps(1, **tensors | (changed or {}))


def maps_of(seed: int = 0, dtype: torch.dtype = torch.bfloat16, **options: Any) -> RidgeMaps:
    known: dict[str, Any] = {
        "model": ModelFingerprint.of(decoder()),
        "tokenizer": tokenizer_fingerprint(Characters()),
        "calibration": {"window": 64},
    }
    parts = [part(split, seed + split, dtype) for split in (2, 1)]
    return RidgeMaps(parts, layer_count=LAYERS, **known | options)


def assert_same(got: RidgeMaps, expected: RidgeMaps) -> None:
    assert (got.splits, got.split, got.layer_count) == (expected.splits, expected.split, expected.layer_count)
    assert (got.model, got.tokenizer, got.calibration) == (
        expected.model,
        expected.tokenizer,
        expected.calibration,
    )
    for split in got.splits:
        one, other = got.at(split), expected.at(split)
        for name in ("layers", "d_in", "dtype", "penalty", "rows", "held_out", "penalty_cosines"):
            assert getattr(one, name) == getattr(other, name)
        for layer in one.layers:
            assert torch.equal(one.matrix(layer), other.matrix(layer))
            assert torch.equal(one.offset(layer), other.offset(layer))
            assert (one.codes(layer) is None) == (other.codes(layer) is None)
            for mine, theirs in zip(one.codes(layer) or (), other.codes(layer) or (), strict=True):
                assert mine.dtype == theirs.dtype
                assert torch.equal(mine, theirs)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    maps_of().save(tmp_path / "maps")
    return tmp_path / "maps"


def mapped_file(tensor: torch.Tensor) -> str | None:
    """The file whose pages the tensor's memory is."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, last = line.split()
        start, end = (int(address, 16) for address in span.split("-"))
        if start <= tensor.data_ptr() < end:
            return last
    return None


def tensor_files(root: Path) -> list[Path]:
    return sorted(root.glob("*.safetensors"))


def rewrite(root: Path, change: Any) -> None:
    """Change the manifest as a forger would: with a checksum that fits."""
    manifest = json.loads((root / MANIFEST).read_text())
    change(manifest)
    manifest.pop("sha256", None)
    checksum = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (root / MANIFEST).write_text(json.dumps(manifest | {"sha256": checksum}))


class TestMaps:
    def test_properties_speak_of_the_default_split(self):
        maps = maps_of()
        assert (maps.split, maps.splits, maps.layers) == (2, (1, 2), (3,))
        other = maps.at(1)
        assert (other.split, other.splits, other.layers) == (1, (1, 2), (2, 3))
        assert other.matrix(3).shape == (WIDTH, WIDTH)
        assert not torch.equal(other.matrix(3), maps.matrix(3))
        assert other.at(2).matrix(3) is maps.matrix(3)
        assert maps.split == 2

    def test_layers_and_splits_without_maps_are_named(self):
        maps = maps_of()
        with pytest.raises(MapsError, match=r"no map for layer 2 at split 2; the only layer with a map is 3$"):
            maps.matrix(2)
        for ask in (maps.matrix, maps.offset, maps.codes, maps.shape):
            with pytest.raises(MapsError, match="no map for layer 9"):
                ask(9)
        with pytest.raises(MapsError, match=r"no map for layer 1 at split 1; the layers with a map are 2, 3$"):
            maps.at(1).matrix(1)
        with pytest.raises(MapsError, match=r"no maps for split 0; the splits with maps are 1, 2$"):
            maps.at(0)
        with pytest.raises(MapsError, match=r"no maps for split 0; the only split with maps is 2$"):
            RidgeMaps([part(2)], layer_count=LAYERS).at(0)

    def test_shape_and_bytes(self):
        wide = SplitMaps(1, {2: torch.zeros(5, 8), 3: torch.zeros(8, 8)}, {2: torch.zeros(5), 3: torch.zeros(8)})
        maps = RidgeMaps([wide], layer_count=LAYERS)
        assert (maps.shape(2), maps.shape(3)) == ((5, 8), (8, 8))
        assert maps.nbytes == 4 * (5 * 8 + 5 + 8 * 8 + 8)
        assert maps.to("int8").nbytes == (5 * 8 + 8 * 8) + 2 * (5 + 8) + 2 * (5 + 8)

    def test_parts_that_do_not_fit_are_refused(self):
        matrix, offset = torch.zeros(8, 8), torch.zeros(8)
        for matrices, offsets in (
            ({}, {}),
            ({2: matrix}, {3: offset}),
            ({1: matrix}, {1: offset}),
            ({2: matrix, 3: torch.zeros(8, 9)}, {2: offset, 3: offset}),
            ({2: matrix}, {2: torch.zeros(7)}),
            ({2: matrix}, {2: offset.bfloat16()}),
            ({2: matrix.double()}, {2: offset.double()}),
        ):
            with pytest.raises(MapsError, match="split 1"):
                SplitMaps(split=1, matrices=matrices, offsets=offsets)
        SplitMaps(split=1, matrices={2: matrix, 3: torch.zeros(5, 8)}, offsets={2: offset, 3: torch.zeros(5)})

    def test_codes_that_do_not_fit_are_refused(self):
        assert int8_part().dtype == torch.int8
        layers = int8_part().layers
        wrongs: tuple[tuple[str, dict[int, torch.Tensor]], ...] = (
            ("scales", {}),
            ("scales", dict.fromkeys(layers[:1], int8_part().scales[2])),
            ("scales", dict.fromkeys(layers, torch.ones(200, 1, dtype=torch.bfloat16))),
            ("scales", dict.fromkeys(layers, torch.ones(200, 3, dtype=torch.bfloat16))),
            ("scales", dict.fromkeys(layers, torch.ones(199, 2, dtype=torch.bfloat16))),
            ("scales", dict.fromkeys(layers, torch.ones(200, 2))),
            ("offsets", dict.fromkeys(layers, torch.zeros(200))),
            ("offsets", dict.fromkeys(layers, torch.zeros(200, dtype=torch.int8))),
            ("matrices", dict.fromkeys(layers, torch.zeros(200, 200, dtype=torch.bfloat16))),
            ("matrices", dict.fromkeys(layers, torch.zeros(200, 200, dtype=torch.uint8))),
            ("matrices", {2: int8_part().matrices[2], 3: torch.zeros(200, 200)}),
        )
        for name, wrong in wrongs:
            with pytest.raises(MapsError, match="split 1"):
                int8_part(changed={name: wrong})

    def test_collections_that_do_not_fit_are_refused(self):
        for parts, layers in (([], 4), ([part(1), part(1)], 4), ([part(1)], 3)):
            with pytest.raises(MapsError):
                RidgeMaps(parts, layer_count=layers)
        with pytest.raises(MapsError, match="one dtype"):
            RidgeMaps([part(1), part(2, dtype=torch.float32)], layer_count=4)

    def test_matches(self):
        assert maps_of().matches(decoder().parameters()) == "same"
        assert maps_of().matches(list(decoder().parameters())[2:4]) == "same"
        assert maps_of().matches(decoder(seed=5).parameters()) == "other weights"
        assert maps_of().matches(decoder(width=12).parameters()) == "other shapes"
        assert maps_of(model=None).matches(decoder(width=12).parameters()) == "same"


class TestConversion:
    def test_its_own_dtype_changes_nothing(self):
        maps = maps_of()
        assert maps.to("bfloat16") is maps
        coded = maps.to("int8")
        assert coded.to("int8") is coded

    def test_to_int8(self):
        maps = maps_of(dtype=torch.float32).at(1)
        coded = maps.to("int8")
        assert (coded.dtype, coded.split, coded.splits) == (torch.int8, 1, (1, 2))
        for layer in maps.layers:
            codes = coded.codes(layer)
            assert codes is not None
            assert [(each.dtype, *each.shape) for each in codes] == [(torch.int8, 8, 8), (torch.bfloat16, 8, 1)]
            assert coded.matrix(layer).dtype == torch.float32
            assert torch.equal(coded.matrix(layer), dequantise(*codes))
            off = (coded.matrix(layer) - maps.matrix(layer)).abs().max() / maps.matrix(layer).abs().max()
            assert 0 < off < 0.00395
            assert coded.offset(layer).dtype == torch.bfloat16
            assert torch.equal(coded.offset(layer), maps.offset(layer).bfloat16())
            assert maps.codes(layer) is None

    def test_from_int8(self):
        coded = maps_of().to("int8")
        for dtype in ("float32", "bfloat16"):
            floats = coded.to(dtype)
            assert floats.dtype == getattr(torch, dtype)
            assert floats.codes(3) is None
            assert torch.equal(floats.matrix(3), coded.matrix(3).to(floats.dtype))
            assert torch.equal(floats.offset(3), coded.offset(3).to(floats.dtype))

    def test_figures_stay_those_of_the_first(self):
        maps = maps_of()
        coded = maps.to("int8")
        assert (coded.held_out, coded.penalty_cosines) == (maps.held_out, maps.penalty_cosines)
        assert (coded.penalty, coded.rows, coded.model) == (maps.penalty, maps.rows, maps.model)
        assert coded.calibration == {"window": 64, "held_out_dtype": "bfloat16"}
        assert coded.to("float32").calibration == coded.calibration
        assert maps.calibration == {"window": 64}

    def test_what_cannot_be_is_refused(self):
        with pytest.raises(OptionError, match="'bfloat16', 'float32', 'int8', not 'float16'"):
            maps_of().to("float16")
        broken = SplitMaps(1, {2: torch.full((4, 4), torch.nan)}, {2: torch.zeros(4)})
        with pytest.raises(MapsError, match="NaN or infinite"):
            RidgeMaps([broken], layer_count=4).to("int8")


class TestRoundTrip:
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
    def test_everything_comes_back(self, tmp_path, dtype):
        maps = maps_of(dtype=torch.float32).to(dtype)
        maps.save(tmp_path)
        assert_same(RidgeMaps.load(tmp_path), maps)

    def test_codes_in_groups_come_back(self, tmp_path):
        maps = RidgeMaps([int8_part()], layer_count=LAYERS)
        maps.save(tmp_path)
        assert_same(RidgeMaps.load(tmp_path), maps)
        assert float(RidgeMaps.load(tmp_path).matrix(3)[-1, -1]) == 1.5

    @pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="where the system tells what is mapped")
    def test_tensors_are_mapped_from_the_files_and_outlive_them(self, saved):
        loaded = RidgeMaps.load(saved)
        expected = loaded.matrix(3).clone()
        for tensor in (loaded.matrix(3), loaded.offset(3), loaded.at(1).matrix(2)):
            assert mapped_file(tensor) in {str(path) for path in tensor_files(saved)}
        maps_of(seed=7).save(saved)
        shutil.rmtree(saved)
        assert torch.equal(loaded.matrix(3), expected)

    def test_writing_to_a_loaded_tensor_leaves_the_file_alone(self, saved):
        loaded = RidgeMaps.load(saved)
        loaded.matrix(3).zero_()
        assert_same(RidgeMaps.load(saved), maps_of())

    def test_without_fingerprints(self, tmp_path):
        maps = RidgeMaps([part(1)], layer_count=LAYERS)
        maps.save(tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loaded = RidgeMaps.load(str(tmp_path), model=decoder(width=20), tokenizer=Characters())
        assert_same(loaded, maps)

    def test_default_split_is_kept(self, tmp_path):
        maps_of().at(1).save(tmp_path)
        assert RidgeMaps.load(tmp_path).split == 1

    def test_views_and_transposed_tensors_are_stored(self, tmp_path):
        matrix = torch.randn(6, WIDTH).T
        maps = RidgeMaps([SplitMaps(1, {2: matrix.T, 3: matrix.T}, {2: matrix[0], 3: matrix[0]})], layer_count=4)
        maps.save(tmp_path)
        assert_same(RidgeMaps.load(tmp_path), maps)

    def test_files_are_plain_safetensors_and_json(self, saved):
        assert len(tensor_files(saved)) == 2
        manifest = json.loads((saved / MANIFEST).read_text())
        assert manifest["format"] == "ridgefill-maps"
        assert {record["split"] for record in manifest["facts"]["splits"]} == {1, 2}
        assert manifest["facts"]["splits"][0]["held_out"]["2"]["cosine"] == pytest.approx(0.92)
        assert all(path.stat().st_mode & 0o044 == 0o044 for path in saved.iterdir())

    def test_saving_again_removes_what_is_no_longer_named_and_nothing_else(self, saved):
        (saved / "notes.txt").write_text("mine")
        (saved / "other.safetensors").write_text("mine")
        (saved / ".split-1.safetensors.partial").write_text("left by a crash")
        before = set(tensor_files(saved))
        maps_of(seed=7).save(saved)
        after = set(tensor_files(saved))
        assert after & before == {saved / "other.safetensors"}
        assert len(after) == 3
        assert (saved / "notes.txt").exists()
        assert not (saved / ".split-1.safetensors.partial").exists()

    def test_equal_maps_give_equal_bytes(self, saved, tmp_path):
        maps_of().save(tmp_path / "again")
        for path in saved.iterdir():
            assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


class TestDamage:
    def test_no_maps(self, tmp_path, saved):
        for place in (tmp_path / "nowhere", tmp_path, saved / MANIFEST):
            with pytest.raises(MapsError, match=f"no maps in .*there is no {MANIFEST}"):
                RidgeMaps.load(place)

    def test_missing_file(self, saved):
        tensor_files(saved)[0].unlink()
        with pytest.raises(MapsError, match="missing"):
            RidgeMaps.load(saved)

    @pytest.mark.parametrize("keep", [0, 1, 7, 8, 100, -1])
    def test_truncated_file(self, saved, keep):
        path = tensor_files(saved)[1]
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(MapsError, match=f"{path.name} is truncated or altered"):
            RidgeMaps.load(saved)

    @settings(max_examples=60)
    @given(data=st.data())
    def test_one_flipped_bit_anywhere(self, tmp_path_factory, data):
        root = tmp_path_factory.mktemp("maps")
        maps_of().save(root)
        path = data.draw(st.sampled_from(sorted(root.iterdir())))
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(content)
        with pytest.raises(MapsError):
            RidgeMaps.load(root)

    @pytest.mark.parametrize("forged", [False, True])
    @pytest.mark.parametrize("protocol", ["torch", *range(2, 6)])
    def test_pickle_is_never_opened(self, saved, tmp_path, monkeypatch, protocol, forged):
        trap = tmp_path / "opened"

        class Trap:
            def __reduce__(self) -> Any:
                return Path.touch, (trap,)

        path = tensor_files(saved)[0]
        if protocol == "torch":
            torch.save({"1.matrix": Trap()}, path)
        else:
            path.write_bytes(pickle.dumps({"1.matrix": Trap()}, protocol=protocol))
        if forged:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()

            def name_it(manifest: dict[str, Any]) -> None:
                (record,) = [file for file in manifest["files"].values() if file["name"] == path.name]
                record["sha256"] = digest

            rewrite(saved, name_it)
        with pytest.raises(MapsError, match="cannot be read as a safetensors file" if forged else "pickle"):
            RidgeMaps.load(saved)
        assert not trap.exists()

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            ("", "cannot be read"),
            ("{", "cannot be read"),
            ("[]", "not a manifest of ridgefill maps"),
            ('{"model_type": "something", "version": 1}', "not a manifest of ridgefill maps"),
            ('{"format": "ridgefill-maps", "version": 1}', "checksum"),
            ("\x00\xff", "cannot be read"),
        ],
    )
    def test_foreign_manifest(self, saved, content, says):
        (saved / MANIFEST).write_bytes(content.encode("latin1"))
        with pytest.raises(MapsError, match=says):
            RidgeMaps.load(saved)

    @pytest.mark.parametrize("version", [0, 2, "1", None])
    def test_other_version(self, saved, version):
        rewrite(saved, lambda manifest: manifest.update(version=version))
        with pytest.raises(MapsError, match=f"format version {version}; .* reads version 1"):
            RidgeMaps.load(saved)

    def test_edited_manifest(self, saved):
        text = (saved / MANIFEST).read_text()
        (saved / MANIFEST).write_text(text.replace('"penalty": 0.03', '"penalty": 0.3'))
        with pytest.raises(MapsError, match="checksum"):
            RidgeMaps.load(saved)

    def test_manifest_with_parts_missing(self, saved, tmp_path):
        manifest = json.loads((saved / MANIFEST).read_text())
        places = [(name,) for name in ("files", "facts")] + [("facts", name) for name in manifest["facts"]]
        for place in places:
            copy = tmp_path / "copy"
            shutil.copytree(saved, copy)

            def drop(manifest: dict[str, Any], place: tuple[str, ...] = place) -> None:
                for name in place[:-1]:
                    manifest = manifest[name]
                del manifest[place[-1]]

            rewrite(copy, drop)
            with pytest.raises(MapsError, match="not complete"):
                RidgeMaps.load(copy)
            shutil.rmtree(copy)

    def test_file_of_another_split_or_width(self, saved, tmp_path):
        RidgeMaps([part(1, width=12)], layer_count=LAYERS).save(tmp_path / "other")
        other = json.loads((tmp_path / "other" / MANIFEST).read_text())["files"]["split-1"]
        shutil.copy(tmp_path / "other" / other["name"], saved)
        rewrite(saved, lambda manifest: manifest["files"].update({"split-1": other}))
        with pytest.raises(MapsError, match="file of split 1 has other layers, widths or dtype"):
            RidgeMaps.load(saved)

    def test_codes_whose_record_says_otherwise(self, tmp_path):
        RidgeMaps([int8_part()], layer_count=LAYERS).save(tmp_path / "maps")
        for name, value, says in (
            ("group", 64, "split 1 have a scale every 64 columns; this ridgefill-compile reads one every 128"),
            ("group", None, "a scale every None columns"),
            ("dtype", "bfloat16", "other layers, widths or dtype"),
            ("dtype", "int4", "not complete: KeyError"),
            ("d_in", 100, "other layers, widths or dtype"),
        ):
            shutil.copytree(tmp_path / "maps", tmp_path / "copy")
            rewrite(tmp_path / "copy", lambda m, n=name, v=value: m["facts"]["splits"][0].update({n: v}))
            with pytest.raises(MapsError, match=says):
                RidgeMaps.load(tmp_path / "copy")
            shutil.rmtree(tmp_path / "copy")


class TestOtherModels:
    def test_own_model_and_tokenizer_load_silently(self, saved):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            RidgeMaps.load(saved, model=decoder(), tokenizer=Characters())
            RidgeMaps.load(saved, model=decoder().bfloat16())

    def test_other_weights_warn(self, saved):
        with pytest.warns(RidgefillWarning, match="other weights") as caught:
            RidgeMaps.load(saved, model=decoder(seed=3))
        assert caught[0].filename == __file__

    def test_other_tokenizer_warns(self, saved):
        with pytest.warns(RidgefillWarning, match="another tokenizer") as caught:
            RidgeMaps.load(saved, tokenizer=Characters(shift=1))
        assert caught[0].filename == __file__

    @pytest.mark.parametrize("other", [{"width": 12}, {"layers": LAYERS + 1}, {"layers": LAYERS - 1}])
    def test_other_widths_or_layers_are_refused(self, saved, other):
        with pytest.raises(MapsError, match=f"model of {LAYERS} layers and width {WIDTH}; this ModuleDict has other"):
            RidgeMaps.load(saved, model=decoder(**other))


class Crash(BaseException):
    """The process dies here: nothing after this point runs, not even cleaning up."""


class TestInterruptedSave:
    """Die before each single step of a save that touches the disk, in turn; the directory must stay whole."""

    @pytest.mark.parametrize("cleans_up", [True, False])
    def test_old_maps_stay_readable_at_every_step(self, tmp_path, monkeypatch, cleans_up):
        old, new = maps_of(), maps_of(seed=9)
        outcomes = []
        for step in range(100):
            root = tmp_path / str(step)
            old.save(root)
            done = self._save_until(new, root, step, monkeypatch, cleans_up)
            loaded = RidgeMaps.load(root)
            got_new = torch.equal(loaded.matrix(3), new.matrix(3))
            assert_same(loaded, new if got_new else old)
            outcomes.append(got_new)
            new.save(root)
            assert_same(RidgeMaps.load(root), new)
            assert len(list(root.iterdir())) == 3
            if done:
                break
        assert done
        assert outcomes == sorted(outcomes)
        assert outcomes.count(False) >= 8
        assert outcomes[-1]

    @staticmethod
    def _save_until(maps: RidgeMaps, root: Path, step: int, monkeypatch: pytest.MonkeyPatch, cleans_up: bool) -> bool:
        """Save, dying at the given step; whether the save came through."""
        left = step

        def tick() -> None:
            nonlocal left
            left -= 1
            if left == -1 or (left < 0 and not cleans_up):
                raise Crash

        def dying(real: Any) -> Any:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                tick()
                return real(*args, **kwargs)

            return wrapped

        def half_writing(real: Any, where: int) -> Any:
            """A write that can die in the middle, with half of the file there."""

            def wrapped(*args: Any) -> None:
                path = args[where]
                tick()
                real(*args)
                content = path.read_bytes()
                path.write_bytes(content[: len(content) // 2])
                tick()
                path.write_bytes(content)

            return wrapped

        with monkeypatch.context() as patch:
            for owner, name in ((os, "fsync"), (Path, "replace"), (Path, "chmod")):
                patch.setattr(owner, name, dying(getattr(owner, name)))
            if not cleans_up:
                patch.setattr(Path, "unlink", dying(Path.unlink))
            patch.setattr(mapfiles, "save_file", half_writing(save_file, 1))
            patch.setattr(mapfiles, "_write_text", half_writing(mapfiles._write_text, 0))
            try:
                maps.save(root)
            except Crash:
                return False
            return True

    def test_first_save_that_dies_leaves_no_maps(self, tmp_path, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError("disk full")))
            with pytest.raises(OSError, match="disk full"):
                maps_of().save(tmp_path)
        with pytest.raises(MapsError, match="no maps"):
            RidgeMaps.load(tmp_path)
