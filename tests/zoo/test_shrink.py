"""Tiny configurations: what is kept of an anatomy, and what becomes of its sizes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, LlamaConfig, MixtralConfig, PretrainedConfig

from ridgefill_compile.errors import OptionError
from ridgefill_compile.zoo.shrink import model_types, pick_layers, shrink, tiny_config, tiny_model, token_ids
from ridgefill_compile.zoo.sizes import HIDDEN, LAYERS, NOT_TEXT_DECODERS, SETTINGS, VOCABULARY, WINDOW

LLAMA_3_1_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
MIXTRAL_8X7B: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}


def decoder_of(config: PretrainedConfig) -> PretrainedConfig:
    return config.get_text_config(decoder=True)


def runs(config: PretrainedConfig) -> torch.Tensor:
    with torch.no_grad():
        return tiny_model(config)(token_ids(2 * WINDOW)).logits


def test_a_llama_of_8_billion() -> None:
    small = shrink(LlamaConfig(**LLAMA_3_1_8B))
    assert isinstance(small, LlamaConfig)
    assert (small.num_hidden_layers, small.hidden_size, small.vocab_size) == (LAYERS, HIDDEN, VOCABULARY)
    assert (small.num_attention_heads, small.num_key_value_heads, small.head_dim) == (4, 2, 16)
    assert small.to_dict()["rope_parameters"]["rope_type"] == "llama3"
    assert small.bos_token_id == 1
    assert small.eos_token_id == [2, 2, 2]
    assert runs(small).shape == (1, 2 * WINDOW, VOCABULARY)


def test_a_mixtral() -> None:
    small = shrink(MixtralConfig(**MIXTRAL_8X7B))
    assert (small.num_local_experts, small.num_experts_per_tok, small.sliding_window) == (4, 2, None)
    assert (small.num_attention_heads, small.num_key_value_heads) == (4, 2)
    assert runs(small).isfinite().all()


@pytest.mark.parametrize(("heads", "keys", "expected"), [(32, 32, 4), (32, 8, 2), (32, 1, 1)])
def test_heads_share_keys_as_they_did(heads: int, keys: int, expected: int) -> None:
    small = shrink(LlamaConfig(hidden_size=4096, num_attention_heads=heads, num_key_value_heads=keys))
    assert small.num_key_value_heads == expected


def test_what_was_given_is_left_alone() -> None:
    config = LlamaConfig(**LLAMA_3_1_8B)
    before = copy.deepcopy(config.to_dict())
    shrink(config)
    assert config.to_dict() == before


def test_settings_override() -> None:
    assert tiny_config("llama", num_hidden_layers=2).num_hidden_layers == 2
    assert decoder_of(tiny_config("gemma3", **{"text_config.sliding_window": 7})).sliding_window == 7


def test_weights_are_the_same_each_time_and_differ_by_seed() -> None:
    one, two, other = (tiny_model(tiny_config("llama"), seed) for seed in (3, 3, 4))
    pairs = list(zip(one.parameters(), two.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not any(torch.equal(a, c) for a, _, c in pairs)


@pytest.mark.parametrize("kind", NOT_TEXT_DECODERS)
def test_what_is_no_text_decoder_says_why(kind: str) -> None:
    assert kind not in model_types()
    with pytest.raises(OptionError, match=f"{kind} is no text decoder"):
        tiny_config(kind)


def test_an_unknown_type() -> None:
    with pytest.raises(OptionError, match="lama is no model type"):
        tiny_config("lama")


# ---------------------------------------------------------------- layers


def types_of(pattern: str) -> dict[str, Any]:
    return {"num_hidden_layers": len(pattern), "layer_types": list(pattern)}


@pytest.mark.parametrize(
    ("pattern", "kept"),
    [
        ("ffffffff", "ffff"),
        ("lllflllf", "lllf"),
        ("sssssfsssssf", "sfsf"),
        ("llllllllahllll", "lahl"),
        ("f", "f"),
        ("ff", "ffff"),
        ("aaaaaaab", "aaab"),
        ("abcdefabcdef", "abcdef"),
    ],
)
def test_every_kind_of_layer_is_kept_in_order(pattern: str, kept: str) -> None:
    assert "".join(pattern[layer] for layer in pick_layers(types_of(pattern))) == kept


def test_kinds_are_told_by_every_list_and_override() -> None:
    entries = {**types_of("ffffffff"), "mlp_layer_types": list("ddddddds")}
    assert pick_layers(entries)[-1] == 7
    assert pick_layers({**types_of("ffffffff"), "mlp_only_layers": [5]}).count(5) == 1
    assert 6 in pick_layers({**types_of("ffffffff"), "per_layer_config": {"06": {"head_dim": 512}}})


def kinds_of(config: PretrainedConfig) -> set[str]:
    return set(getattr(decoder_of(config), "layer_types", None) or ())


def test_every_type_keeps_its_kinds_of_layers() -> None:
    for kind in model_types():
        small = tiny_config(kind)
        decoder = decoder_of(small)
        assert type(small) is CONFIG_MAPPING[kind]
        if "layer_types" not in SETTINGS.get(kind, {}):
            assert kinds_of(small) == kinds_of(CONFIG_MAPPING[kind]()) or kind in SETTINGS, kind
        assert getattr(decoder, "num_hidden_layers", LAYERS) <= 12, kind
        assert getattr(decoder, "vocab_size", VOCABULARY) == VOCABULARY, kind
        assert getattr(decoder, "hidden_size", HIDDEN) <= 2 * HIDDEN, kind


@pytest.mark.heavy
@pytest.mark.parametrize("kind", model_types())
def test_every_type_runs(kind: str) -> None:
    model = tiny_model(tiny_config(kind))
    with torch.no_grad():
        logits = model(input_ids=token_ids(2 * WINDOW)).logits
    assert logits.shape[-1] == VOCABULARY
    assert logits.isfinite().all()
    assert sum(parameter.numel() for parameter in model.parameters()) < 10_000_000
