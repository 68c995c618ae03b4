"""What may change after a graph was compiled: maps, weights, the model, and what Dynamo is willing to compile."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgefill_compile import calibrate
from ridgefill_compile.errors import CannotFill, RidgefillWarning
from ridgefill_compile.report import report
from tests.toys import LONG, ORACLE, TAIL, compiled, distance, plain, prompt, random_maps

WIDTH = plain().config.width
RIDGE: dict[str, Any] = {"tail": TAIL, "min_fill": 8, "inner": "eager"}
KEEP = {"logits_to_keep": 2}


def seeded(seed: int) -> Any:
    torch.manual_seed(seed)
    model = plain()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def test_maps_saved_over_the_compiled_ones_are_noticed(tmp_path: Path) -> None:
    """Dynamo takes equal options for one backend: it would go on with the maps that are compiled in."""
    model = seeded(0)
    random_maps(WIDTH, of=model).save(tmp_path / "maps")
    fast = compiled(model, {**RIDGE, "maps": str(tmp_path / "maps")})
    fast(prompt(), **KEEP)
    assert report(model).graphs[-1].filled
    random_maps(WIDTH, of=model).save(tmp_path / "maps")
    with pytest.warns(RidgefillWarning, match="changed after this graph was compiled"):
        found = fast(prompt(), **KEEP)
    with torch.no_grad():
        assert distance(found, model(prompt(), **KEEP)) == 0.0
    assert "torch._dynamo.reset()" in str(report(model).graphs[-1].hint)


def test_another_model_that_shares_its_first_parameter_is_checked() -> None:
    model, other = seeded(0), seeded(1)
    name = next(iter(dict(model.named_parameters())))
    owner, _, attribute = name.rpartition(".")
    setattr(other.get_submodule(owner), attribute, model.get_parameter(name))
    maps = random_maps(WIDTH, of=model)
    compiled(model, {**RIDGE, "maps": maps})(prompt(), **KEEP)
    with pytest.warns(RidgefillWarning, match="other weights"):
        found = compiled(other, {**RIDGE, "maps": maps})(prompt(), **KEEP)
    with torch.no_grad():
        assert distance(found, other(prompt(), **KEEP)) == 0.0


@pytest.mark.parametrize("strict", [False, True])
def test_weights_changed_in_place_are_checked_again(strict: bool) -> None:
    model = seeded(0)
    fast = compiled(model, {**RIDGE, "maps": random_maps(WIDTH, of=model), "strict": strict})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast(prompt(), **KEEP)
        fast(prompt(), **KEEP)
    model.load_state_dict(seeded(1).state_dict())
    if strict:
        with pytest.raises(CannotFill, match="other weights"):
            fast(prompt(), **KEEP)
        return
    with pytest.warns(RidgefillWarning, match="other weights"):
        found = fast(prompt(), **KEEP)
    with torch.no_grad():
        assert distance(found, model(prompt(), **KEEP)) == 0.0


def test_dynamos_limit_is_announced_before_it_bites() -> None:
    model = plain()
    fast = torch.compile(model, backend="ridgefill", options=ORACLE, dynamic=False)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=3):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fast(prompt(LONG), **KEEP)
            fast(prompt(LONG + 1), **KEEP)
        with pytest.warns(RidgefillWarning, match="recompile_limit is 3"):
            fast(prompt(LONG + 2), **KEEP)


def test_calibrations_use_up_nothing_of_it() -> None:
    model = plain()
    texts = [prompt(64, seed=seed)[0] for seed in range(4)]
    with torch._dynamo.config.patch(recompile_limit=3):
        for split in (0, 1, 0, 1, 0):
            calibrate(model, texts, splits=[split], window=32, held_out=1, progress=False)
        fast = torch.compile(model, backend="ridgefill", options=ORACLE)
        with torch.no_grad():
            fast(prompt(), **KEEP)
    assert report(model).graphs[-1].filled


LOSSLESS: dict[str, Any] = {"route": "lossless", "min_fill": 8, "inner": "eager"}


class TestLossless:
    def test_rows_that_nobody_reads_are_dropped_and_nothing_else_changes(self) -> None:
        model = plain()
        found = compiled(model, LOSSLESS)(prompt(), **KEEP)
        with torch.no_grad():
            assert distance(found, model(prompt(), **KEEP)) < 1e-5
        (graph,) = report(model).graphs
        assert graph.filled
        assert graph.multiply_adds_exact is not None
        assert graph.multiply_adds_filled is not None
        assert graph.multiply_adds_filled < 0.9 * graph.multiply_adds_exact  # most of one of three layers
        assert "lossless" in str(report(model))

    def test_any_length(self) -> None:
        model = plain()
        fast = compiled(model, LOSSLESS)
        for rows in (40, 33, 57):
            found = fast(prompt(rows), **KEEP)
            with torch.no_grad():
                assert distance(found, model(prompt(rows), **KEEP)) < 1e-5
        assert [graph.dynamic for graph in report(model).graphs] == [False, True]

    def test_a_prompt_whose_every_row_is_wanted_runs_exactly_with_a_reason(self) -> None:
        model = plain()
        with pytest.warns(RidgefillWarning, match="every one is read"):
            compiled(model, LOSSLESS)(prompt())

    def test_short_prompts_and_decode_steps_stay_as_they_are(self) -> None:
        model = plain()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compiled(model, LOSSLESS)(prompt(6), **KEEP)
        assert "min_fill" in report(model).graphs[-1].reason
