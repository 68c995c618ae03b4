"""The toy decoders are decoders: they run, cache, look at the past only, and have weights that matter."""

from __future__ import annotations

import pytest
import torch

from tests.decoders import CORE, EITHER, FILLED, LAYERS, REFUSED, VOCABULARY, WINDOW, states_of, token_ids

ALL = {**FILLED, **REFUSED, **EITHER}
ROWS, CHANGED = 40, 20


@pytest.mark.parametrize("name", ALL)
def test_architecture_is_a_causal_decoder(name):
    model = ALL[name].build()
    ids = token_ids(ROWS, batch=2)
    other = ids.clone()
    other[:, CHANGED] = 3 + (ids[:, CHANGED] - 2) % (VOCABULARY - 3)
    with torch.no_grad():
        output = model(ids, use_cache=True)
        difference = (model(other, use_cache=True).logits - output.logits).abs().amax(dim=(0, 2))

    assert output.logits.shape == (2, ROWS, VOCABULARY)
    assert output.logits.dtype == torch.float32
    assert difference[:CHANGED].max() < 1e-5
    # Two layers of windows of 24 rows reach the end.
    assert difference[CHANGED].item() > 0.1
    assert difference[-1].item() > 1e-3
    assert not model.training


@pytest.mark.parametrize("name", FILLED)
def test_filled_architecture_caches_every_layer(name):
    model = FILLED[name].build()
    with torch.no_grad():
        states = states_of(model(token_ids(ROWS), use_cache=True, logits_to_keep=1))
    assert set(states) == {f"{layer}.{name}" for layer in range(LAYERS) for name in ("keys", "values")}
    for state in states.values():
        assert state.shape[-2] in (ROWS, WINDOW - 1)
        assert state.std() > 0.05


@pytest.mark.parametrize("name", FILLED)
def test_every_weight_of_a_late_layer_matters(name):
    """Zeroing any one matrix of the last layer moves the last row's logits or that layer's cache."""
    model = FILLED[name].build()
    ids = token_ids(ROWS)

    def outputs() -> torch.Tensor:
        output = model(ids, use_cache=True)
        last = [state.flatten() for name, state in states_of(output).items() if name.startswith(f"{LAYERS - 1}.")]
        return torch.cat([output.logits[:, -1].flatten(), *last])

    with torch.no_grad():
        expected = outputs()
        for weight_name, weight in model.named_parameters():
            if f".{LAYERS - 1}." not in weight_name or weight.dim() < 2:
                continue
            saved = weight.clone()
            weight.zero_()
            assert (outputs() - expected).abs().max() > 1e-2, weight_name
            weight.copy_(saved)


def test_core_is_a_part_of_filled():
    assert set(CORE) < set(FILLED)


def test_build_is_reproducible():
    first, second = (FILLED["llama"].build(seed=3).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], FILLED["llama"].build(seed=4).state_dict()["lm_head.weight"])
