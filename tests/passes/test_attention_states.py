"""Keys are told from values by what of attention reads them, in every anatomy."""

from __future__ import annotations

import pytest
import torch

from ridgefill_compile.passes.attention_states import BOTH, KEY, VALUE, AttentionStates, attention_states
from ridgefill_compile.passes.calls import shape
from ridgefill_compile.passes.correct import Correction
from ridgefill_compile.passes.locate import locate
from ridgefill_compile.recurrences.substitute import substitute_recurrences
from tests.decoders import EITHER, FILLED, RECURRENT, cache_of, token_ids
from tests.passes.graphs import traced_decoder

ROWS, BATCH = 40, 2
LATENT = ("deepseek_v3", "minicpm3", "youtu")


def found_in(name: str) -> tuple[AttentionStates, list[tuple[torch.Size, torch.Size]]]:
    """States of the layers behind the first one, and the sizes of the keys and values that the model's cache holds."""
    model = {**FILLED, **RECURRENT, **EITHER}[name].build()
    substitute_recurrences(model)
    ids = token_ids(ROWS, batch=BATCH)
    with torch.no_grad():
        graph, _ = traced_decoder(model, ids, logits_to_keep=1)
        layers = cache_of(model(ids, use_cache=True)).layers
    sizes = [(layer.keys.shape, layer.values.shape) for layer in layers[1:] if getattr(layer, "keys", None) is not None]
    return attention_states(graph.graph, locate(graph.graph), 0), sizes


@pytest.mark.parametrize("name", [name for name in FILLED if name not in LATENT])
def test_every_layer_of_attention_has_both(name: str) -> None:
    states, sizes = found_in(name)
    assert states.left_alone == {}
    assert len(states.found) == 2 * len(sizes) == 6
    for role, place in ((KEY, 0), (VALUE, 1)):
        for state, size in zip(states.of(role), sizes, strict=True):
            assert (state.row_dim, state.entry_dim, state.batch_dim) == (2, 3, 0)
            heads, entries = size[place][1], size[place][3]
            assert list(shape(state.rows)) == [BATCH, heads, ROWS, entries]  # even where the cache holds a window


@pytest.mark.parametrize("name", LATENT)
def test_what_keys_and_values_are_made_of_is_left_alone(name: str) -> None:
    states, _ = found_in(name)
    assert states.found == ()
    assert states.left_alone == dict.fromkeys((1, 2, 3), BOTH)


@pytest.mark.parametrize("name", [*RECURRENT, "lfm2"])
def test_recurrences_are_left_alone(name: str) -> None:
    states, sizes = found_in(name)
    assert len(states.found) == 2 * len(sizes)
    assert all("no attention reads" in reason for reason in states.left_alone.values())
    assert {state.layer for state in states.found} | set(states.left_alone) == {1, 2, 3}


def test_what_is_told() -> None:
    states = AttentionStates((), {1: BOTH, 2: "a state without rows", 3: BOTH})
    done, left = Correction(value_rescale=1).told(states)
    assert done == []
    assert left == [f"{BOTH}: layers 1, 3", "a state without rows: layers 2"]
