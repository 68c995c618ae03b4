"""Filled keys and values that are the exact model's: each in its place, and with both nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ridgefill_compile.passes.splice import at_norms_of
from ridgefill_compile.report import report
from tests.decoders import states_of, token_ids
from tests.toys import LONG, MIN_FILL, TAIL, compiled, distance, pretrained, random_maps

LAYERS = 3
CALL: dict[str, Any] = {"use_cache": True, "logits_to_keep": TAIL}
FILLED_ROWS = slice(0, LONG - TAIL)


def spliced(model: Any, splice: str | None, **options: Any) -> Any:
    """A call of the model whose last two layers are filled."""
    maps = random_maps(64, layers=LAYERS, splits=(0,))
    given = {"tail": TAIL, "min_fill": MIN_FILL, "inner": "eager", "strict": True, "maps": maps, "splice": splice}
    return compiled(model, given | options)(token_ids(LONG, batch=2), **CALL)


def exact(model: Any) -> Any:
    with torch.no_grad():
        return model(token_ids(LONG, batch=2), **CALL)


@pytest.mark.parametrize("name", ["llama", "llama_eager", "qwen3", "mistral", "phi3", "gpt2", "bloom"])
def test_both_is_the_exact_model(name: str) -> None:
    model = pretrained(name, layers=LAYERS)
    assert distance(spliced(model, None), exact(model)) > 0.05
    assert distance(spliced(model, "both"), exact(model)) < 1e-4


@pytest.mark.parametrize(("splice", "other"), [("keys", "values"), ("values", "keys")])
def test_one_of_them_leaves_the_other_as_it_is_filled(splice: str, other: str) -> None:
    model = pretrained(layers=LAYERS)
    found, plain, truth = (states_of(x) for x in (spliced(model, splice), spliced(model, None), exact(model)))
    for layer in (1, 2):
        for name, like in ((splice, truth), (other, plain)):
            key = f"{layer}.{name}"
            torch.testing.assert_close(
                found[key][:, :, FILLED_ROWS], like[key][:, :, FILLED_ROWS], rtol=1e-4, atol=1e-4
            )
        assert not torch.allclose(found[f"{layer}.{other}"], truth[f"{layer}.{other}"], atol=0.01)


def test_key_norms_turn_no_key() -> None:
    model = pretrained(layers=LAYERS)
    found, plain, truth = (
        states_of(x)["1.keys"][:, :, FILLED_ROWS]
        for x in (spliced(model, "key_norms"), spliced(model, None), exact(model))
    )
    torch.testing.assert_close(found.norm(dim=-1), truth.norm(dim=-1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.cosine_similarity(found, plain, -1), torch.ones(found.shape[:-1]))
    assert not torch.allclose(found.norm(dim=-1), plain.norm(dim=-1), atol=0.01)


def test_with_values_rescaled_too() -> None:
    """Keys are the exact model's, values as long as theirs."""
    model = pretrained(layers=LAYERS)
    found, keys, values = (
        states_of(spliced(model, splice, value_rescale=count))
        for splice, count in (("keys", 4), ("keys", 0), (None, 4))
    )
    torch.testing.assert_close(found["1.keys"], keys["1.keys"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found["1.values"], values["1.values"], rtol=1e-4, atol=1e-4)


def test_the_report_says_what_was_done() -> None:
    model = pretrained(layers=LAYERS)
    spliced(model, "keys", value_rescale=2)
    graph = report(model).graphs[-1]
    assert graph.corrected == ["values rescaled: layers 1, 2", "keys spliced: layers 1, 2"]
    assert graph.uncorrected == []
    assert "corrected: keys spliced: layers 1, 2" in str(report(model))


def test_no_key_has_no_length() -> None:
    zero, ones = torch.zeros(1, 2, 3, 4), torch.ones(1, 2, 3, 4)
    assert torch.equal(at_norms_of(zero, ones, 3), zero)
    assert torch.equal(at_norms_of(2 * ones, ones, 3), ones)
