"""Maps, split and graph must belong together: what runs, what is refused, what is an error."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgefill_compile.errors import CannotFill, MapsError, RidgefillWarning
from ridgefill_compile.maps import RidgeMaps
from ridgefill_compile.report import report
from ridgefill_compile.testing import Decoder, DecoderConfig
from tests.decoders import token_ids
from tests.toys import LONG, MIN_FILL, TAIL, compiled, distance, plain, pretrained, prompt, random_maps

KEEP = {"logits_to_keep": 2}
RIDGE: dict[str, Any] = {"tail": TAIL, "min_fill": MIN_FILL, "inner": "eager"}
WIDTH = DecoderConfig.width


def filled(model: Decoder, maps: Any, **options: Any) -> Any:
    """A call under `strict`: filled, or an error."""
    return compiled(model, RIDGE | {"maps": maps, "strict": True} | options)(prompt(), **KEEP)


def refused(model: Decoder, maps: Any, **options: Any) -> str:
    """The reason why a prompt runs exactly, after checking that it does."""
    with torch.no_grad():
        expected = model(prompt(), **KEEP)
    with pytest.warns(RidgefillWarning):
        found = compiled(model, RIDGE | {"maps": maps} | options)(prompt(), **KEEP)
    assert distance(found, expected) == 0.0
    return report(model).graphs[-1].reason


class TestMapsThatFit:
    def test_given_or_from_their_directory(self, tmp_path: Path) -> None:
        model = plain()
        maps = random_maps(WIDTH, of=model)
        maps.save(tmp_path)
        given = filled(model, maps)
        assert distance(filled(model, str(tmp_path)), filled(model, tmp_path)) == 0.0
        assert distance(filled(model, tmp_path), given) < 1e-5
        assert {graph.split for graph in report(model).graphs} == {1}
        with torch.no_grad():
            assert distance(given, model(prompt(), **KEEP)) > 0.1

    def test_directory_is_read_anew_when_it_changes(self, tmp_path: Path) -> None:
        model = plain()
        random_maps(WIDTH, splits=(1,)).save(tmp_path)
        filled(model, tmp_path)
        random_maps(WIDTH, splits=(0,)).save(tmp_path)
        torch._dynamo.reset()
        filled(model, tmp_path)
        assert [graph.split for graph in report(model).graphs] == [1, 0]

    def test_split_chooses_among_several(self) -> None:
        model = plain()
        maps = random_maps(WIDTH, splits=(0, 1))
        for options in ({}, {"split": 0}, {"split": 1}):
            filled(model, maps, **options)
        assert [graph.split for graph in report(model).graphs] == [0, 0, 1]

    def test_stored_in_bfloat16(self) -> None:
        """What is stored is what is computed with, in the model's own dtype."""
        model = plain()
        maps = random_maps(WIDTH)
        half = RidgeMaps([part_in(maps, torch.bfloat16)], layer_count=3)
        back = RidgeMaps([part_in(half, torch.float32)], layer_count=3)
        assert distance(filled(model, half), filled(model, back)) == 0.0

    def test_other_routes_take_the_split_of_maps_and_nothing_else(self) -> None:
        model = plain()
        filled(model, random_maps(WIDTH + 1), route="identity")
        assert [graph.split for graph in report(model).graphs] == [1]

    def test_close_relatives_on_request(self) -> None:
        maps = random_maps(WIDTH, of=plain(seed=3))
        filled(plain(), maps, check_weights=False)


def part_in(maps: RidgeMaps, dtype: torch.dtype) -> Any:
    """The maps' only part in another dtype."""
    from ridgefill_compile.maps import SplitMaps

    return SplitMaps(
        maps.split,
        {layer: maps.matrix(layer).to(dtype) for layer in maps.layers},
        {layer: maps.offset(layer).to(dtype) for layer in maps.layers},
    )


class TestMapsOfAnotherModel:
    def test_other_weights(self) -> None:
        model, maps = plain(), random_maps(WIDTH, of=plain(seed=3))
        assert refused(model, maps) == "the maps were calibrated on other weights"
        with pytest.raises(CannotFill, match="other weights"):
            filled(model, maps)

    def test_weights_changed_since(self) -> None:
        model = plain()
        maps = random_maps(WIDTH, of=model)
        with torch.no_grad():
            dict(model.named_parameters())["blocks.2.mlp.down.weight"].mul_(1.5)
        assert refused(model, maps) == "the maps were calibrated on other weights"

    def test_other_widths(self) -> None:
        assert (
            refused(plain(), random_maps(WIDTH + 2)) == "the map of layer 2 is (12, 12), and the model needs (10, 10)"
        )

    @pytest.mark.parametrize("layers", [2, 4])
    def test_other_depth(self, layers: int) -> None:
        reason = refused(plain(layers=layers), random_maps(WIDTH))
        assert reason == f"the maps are for 3 layers and this graph holds {layers}"

    def test_split_they_were_not_fitted_for(self) -> None:
        maps = random_maps(WIDTH, splits=(0, 1))
        for strict in (True, False):
            with pytest.raises(MapsError, match=r"no maps for split 2; .* 0, 1"):
                filled(plain(), maps, split=2, strict=strict)

    def test_one_compiled_graph_for_two_models(self) -> None:
        """Dynamo keeps one graph for models of the same code, sizes and options: weights are looked at all the same."""
        model, other = plain(), plain(seed=3)
        options = RIDGE | {"maps": random_maps(WIDTH, of=model)}
        first = compiled(model, options)(prompt(), **KEEP)
        with torch.no_grad():
            expected = other(prompt(), **KEEP)
        fast = compiled(other, options)
        with pytest.warns(RidgefillWarning, match="calibrated on other weights"):
            assert distance(fast(prompt(), **KEEP), expected) == 0.0
        assert distance(fast(prompt(), **KEEP), expected) == 0.0
        assert distance(compiled(model, options)(prompt(), **KEEP), first) == 0.0
        assert [graph.filled for graph in report(model).graphs] == [True]
        assert [graph.reason for graph in report(other).graphs] == ["the maps were calibrated on other weights"]

    def test_one_compiled_graph_for_two_models_that_it_fits(self) -> None:
        maps = random_maps(WIDTH)
        models = plain(), plain(seed=3)
        answers = [filled(model, maps) for model in models]
        assert distance(*answers) > 0.1
        for model, answer in zip(models, answers, strict=True):
            assert [graph.filled for graph in report(model).graphs] == [True]
            torch._dynamo.reset()
            assert distance(filled(model, maps), answer) == 0.0


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-8])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def put_a_pickle(file: Path) -> None:
    file.write_bytes(pickle.dumps({"2.matrix": [1.0]}))


class TestDamagedFiles:
    """An error at the call, `strict` or not: running exactly would hide that the maps are lost."""

    def raises(self, directory: Path, says: str) -> None:
        call = compiled(plain(), RIDGE | {"maps": str(directory)})
        with pytest.raises(MapsError, match=says) as raised:
            call(prompt(), **KEEP)
        assert type(raised.value) is MapsError

    def test_no_directory(self, tmp_path: Path) -> None:
        self.raises(tmp_path / "nowhere", "no maps in .*nowhere")

    def test_empty_directory(self, tmp_path: Path) -> None:
        self.raises(tmp_path, "there is no manifest.json")

    @pytest.mark.parametrize(
        ("damage", "says"),
        [
            (truncate, "truncated or altered"),
            (flip, "truncated or altered"),
            (put_a_pickle, "pickle"),
            (Path.unlink, "missing"),
        ],
    )
    def test_tensor_file(self, tmp_path: Path, damage: Callable[[Path], None], says: str) -> None:
        random_maps(WIDTH).save(tmp_path)
        damage(next(tmp_path.glob("*.safetensors")))
        self.raises(tmp_path, says)

    @pytest.mark.parametrize("damage", [truncate, flip, put_a_pickle])
    def test_manifest(self, tmp_path: Path, damage: Callable[[Path], None]) -> None:
        random_maps(WIDTH).save(tmp_path)
        damage(tmp_path / "manifest.json")
        self.raises(tmp_path, "manifest.json")

    def test_through_generate(self, tmp_path: Path) -> None:
        model = pretrained()
        random_maps(64, layers=2, splits=(0,)).save(tmp_path)
        flip(next(tmp_path.glob("*.safetensors")))
        from ridgefill_compile.backend import ridgefill

        model.compile(backend=ridgefill, options=RIDGE | {"maps": str(tmp_path)})
        with pytest.raises(MapsError, match="truncated or altered"):
            model.generate(token_ids(LONG), max_new_tokens=1)
