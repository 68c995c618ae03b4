"""Maps that predict projections: where they are right, a fill is the exact model; calibrated, saved, loaded, filled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgefill_compile.calibrate import calibrate
from ridgefill_compile.cli import about_maps
from ridgefill_compile.collect import StateCollector
from ridgefill_compile.errors import CalibrationError, MapsError, OptionError
from ridgefill_compile.fit import fit_split
from ridgefill_compile.maps import RidgeMaps, SplitMaps
from ridgefill_compile.report import report
from ridgefill_compile.ridge import RidgeStatistics
from ridgefill_compile.splitmaps import INPUT, PROJECTIONS
from tests.decoders import RECURRENT, VOCABULARY, token_ids
from tests.test_fill import refused
from tests.toys import LONG, MIN_FILL, TAIL, compiled, distance, plain, pretrained

LAYERS, WIDTH, STATES = 3, 64, 32  # of a toy Llama: hidden size, and columns of its keys or values
RIDGE: dict[str, Any] = {"tail": TAIL, "min_fill": MIN_FILL, "inner": "eager", "strict": True}
CALL: dict[str, Any] = {"use_cache": True, "logits_to_keep": TAIL}


def prompt() -> Tensor:
    """No token twice, so that layers are linear in the embedding on these rows."""
    return 1 + torch.randperm(VOCABULARY - 1, generator=torch.Generator().manual_seed(0))[None, :LONG]


def exact(model: Any) -> Any:
    with torch.no_grad():
        return model(prompt(), **CALL)


def fill(model: Any, maps: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return compiled(model, RIDGE | {"maps": maps} | options)(prompt(), **CALL)


def maps_of_the_prompt(model: Any, split: int = 0) -> SplitMaps:
    """Maps that say what the model does on the prompt, which has fewer rows than its states have columns."""
    collector = StateCollector(model, [split], stride=1, cut=PROJECTIONS)
    rows = collector.rows(prompt())
    sums = RidgeStatistics.from_rows(
        split, rows[split], {layer: value[:, WIDTH:] for layer, value in rows.items() if layer > split}
    )
    for name, total in collector.sums(prompt())[split].to_tensors().items():
        torch.testing.assert_close(total, sums.to_tensors()[name])
    return fit_split(sums, rows, [0.0], "float32", widths=collector.widths)


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.heavy), "qwen3", "gpt2"])
def test_true_projections_are_the_exact_model(name: str) -> None:
    model = pretrained(name, layers=LAYERS)
    part = maps_of_the_prompt(model)
    assert part.held_out[2]["cosine"] == pytest.approx(1, abs=1e-5)
    maps = RidgeMaps([part], layer_count=LAYERS)
    assert distance(fill(model, maps), exact(model)) < 1e-3
    wrong = replace(part, offsets={layer: offset + 1 for layer, offset in part.offsets.items()})
    assert distance(fill(model, RidgeMaps([wrong], layer_count=LAYERS)), exact(model)) > 0.05


def test_states_that_are_too_short_are_made_as_long_as_exact_ones() -> None:
    model = pretrained(layers=LAYERS)
    part = maps_of_the_prompt(model)
    half = replace(
        part,
        matrices={layer: matrix / 2 for layer, matrix in part.matrices.items()},
        offsets={layer: offset / 2 for layer, offset in part.offsets.items()},
    )
    maps = RidgeMaps([half], layer_count=LAYERS)
    assert distance(fill(model, maps), exact(model)) > 0.05
    assert distance(fill(model, maps, value_rescale=4, key_rescale=3), exact(model)) < 1e-3
    assert distance(fill(model, maps, splice="both"), exact(model)) < 1e-4


def texts(count: int = 8) -> list[Tensor]:
    return [token_ids(96, seed=seed)[0] for seed in range(count)]


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.heavy), "int8"])
def test_calibrated_saved_loaded_and_filled(tmp_path: Path, dtype: str) -> None:
    model = pretrained(layers=LAYERS)
    given: dict[str, Any] = {"splits": [0, 1], "window": 48, "stride": 1, "progress": False, "dtype": dtype}
    maps = calibrate(model, texts(), cut=PROJECTIONS, **given)
    assert (maps.cut, maps.layers, maps.widths(1), maps.shape(2)) == (
        PROJECTIONS,
        (1, 2),
        (STATES, STATES),
        (2 * STATES, WIDTH),
    )
    for figures in maps.held_out.values():
        assert figures["cosine"] == pytest.approx((figures["cosine.0"] + figures["cosine.1"]) / 2)
        assert "identity_cosine" not in figures
    maps.save(tmp_path)
    back = RidgeMaps.load(tmp_path, model=model)
    assert (back.cut, back.held_out, back.at(1).widths(2)) == (PROJECTIONS, maps.held_out, (STATES, STATES))
    assert about_maps(tmp_path)["cut"] == PROJECTIONS
    output = fill(model, back)
    assert distance(output, fill(model, maps)) == 0.0
    assert distance(output, fill(model, maps.to("float32"))) < 1e-5
    assert distance(output, exact(model)) > 0.01
    projected = report(model).graphs[-1].multiply_adds_filled
    fill(model, calibrate(model, texts(), **given))
    assert projected is not None
    whole = report(model).graphs[-1].multiply_adds_filled
    assert whole is not None
    assert whole - projected == (LONG - TAIL) * 2 * WIDTH * WIDTH


def test_splits_have_the_maps_they_would_have_alone() -> None:
    """A layer that is split at and predicted from another split has two kinds of rows."""
    model = pretrained(layers=LAYERS)
    given: dict[str, Any] = {"window": 48, "progress": False, "cut": PROJECTIONS}
    both = calibrate(model, texts(), splits=[0, 1], **given).at(1)
    alone = calibrate(model, texts(), splits=1, **given)
    assert both.held_out == alone.held_out
    assert torch.equal(both.matrix(2), alone.matrix(2))


def test_recurrences_cannot_be_calibrated() -> None:
    with pytest.raises(CalibrationError, match="layer 2 writes a state that no projection"):
        calibrate(RECURRENT["qwen3_next"].build(), texts(), splits=1, window=48, progress=False, cut=PROJECTIONS)


def test_no_such_cut() -> None:
    with pytest.raises(OptionError, match="cut must be one of 'input', 'projections', not 'keys'"):
        calibrate(plain(), texts(), splits=1, cut="keys")


@pytest.mark.parametrize("biased", [False, True])
def test_weights_of_others(tmp_path: Path, biased: bool) -> None:
    """Where a late layer's attention reads the split state, its own weights and norm are its maps."""
    model = pretrained(layers=LAYERS, attention_bias=biased)
    first, last = model.model.layers[1:]
    for name in ("self_attn.o_proj", "mlp.down_proj"):  # the layer between changes nothing
        for weight in first.get_submodule(name).parameters():
            torch.nn.init.zeros_(weight)
    own = (last.self_attn.k_proj, last.self_attn.v_proj)
    maps = RidgeMaps.of_projections(
        {2: [each.weight for each in own]},
        offsets={2: [each.bias for each in own]} if biased else None,
        norm=last.input_layernorm.weight,
        epsilon=model.config.rms_norm_eps,
        split=1,
        layer_count=LAYERS,
        dtype="float32",
    )
    maps.save(tmp_path)
    assert distance(fill(model, RidgeMaps.load(tmp_path)), exact(model)) < 1e-4


def test_weights_that_do_not_fit() -> None:
    weights = {2: [torch.zeros(4, 10), torch.zeros(6, 10)]}
    with pytest.raises(MapsError, match="an offset as wide as each"):
        RidgeMaps.of_projections(weights, offsets={2: [torch.zeros(10)]}, split=1, layer_count=3)
    for norm, narrow in ((torch.ones(9), 10), (None, 9)):
        weights[2][1] = torch.zeros(6, narrow)
        with pytest.raises(MapsError, match="do not fit together"):
            RidgeMaps.of_projections(weights, norm=norm, split=1, layer_count=3)


class TestMapsOfProjections:
    def part(self, widths: tuple[int, ...], d_in: int = 10, split: int = 1) -> SplitMaps:
        matrix = torch.zeros(sum(widths), d_in)
        return SplitMaps(split, {2: matrix}, {2: torch.zeros(sum(widths))}, widths={2: widths})

    def test_other_widths(self) -> None:
        model = plain()
        maps = RidgeMaps([self.part((4, 6))], layer_count=3)
        assert "the model needs" in refused(model, maps)

    def test_must_fit_together(self) -> None:
        part = self.part((4, 6))
        with pytest.raises(MapsError, match=r"predicts 10 columns, and its projections have 4 \+ 7"):
            replace(part, widths={2: (4, 7)})
        with pytest.raises(MapsError, match="for each of its layers, or for none"):
            replace(part, widths={1: (4, 6)})

    def test_all_splits_predict_the_same(self) -> None:
        inputs = SplitMaps(0, {2: torch.zeros(10, 10)}, {2: torch.zeros(10)})
        assert inputs.cut == INPUT
        with pytest.raises(MapsError, match="must predict the same"):
            RidgeMaps([self.part((4, 6)), inputs], layer_count=3)
