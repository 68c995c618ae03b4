"""Models with random weights in the shape of well-known families: for speed, which does not depend on the weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from ridgefill_compile.maps import RidgeMaps
from ridgefill_compile.splitmaps import SplitMaps

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    # Three of four layers are Gated DeltaNet, as in Qwen3.5; 179 M parameters.
    "hybrid": (
        "qwen3_5_text",
        {
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_hidden_layers": 20,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "linear_num_key_heads": 6,
            "linear_num_value_heads": 12,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 5,
            "tie_word_embeddings": True,
        },
    ),
    # 32 experts, of which each row meets 4, as in Qwen3-MoE but fewer; 383 M parameters.
    "experts": (
        "qwen3_moe",
        {
            "hidden_size": 576,
            "num_hidden_layers": 16,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 384,
            "tie_word_embeddings": True,
        },
    ),
    # A wide residual stream, so that maps are as large as layers; 407 M parameters.
    "wide": (
        "llama",
        {
            "hidden_size": 2048,
            "intermediate_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
}


def random_model(shape: str, vocabulary: int, dtype: str = "float32") -> PreTrainedModel:
    """A model of one of `SHAPES`, in eval mode on the CPU."""
    kind, settings = SHAPES[shape]
    every: dict[str, Any] = {"vocab_size": vocabulary, "pad_token_id": None, "eos_token_id": None, **settings}
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[kind](**every), dtype=getattr(torch, dtype)
    )
    model.eval()
    return model


def made_up_maps(model: Any, split: int) -> RidgeMaps:
    """Maps of the right shapes for a plain decoder: the identity plus a little noise, so that nothing overflows."""
    width, layers = model.config.hidden_size, model.config.num_hidden_layers
    generator = torch.Generator().manual_seed(0)

    def matrix() -> torch.Tensor:
        return (torch.eye(width) + 0.01 * torch.randn(width, width, generator=generator)).bfloat16()

    late = range(split + 1, layers)
    offsets = {layer: torch.zeros(width, dtype=torch.bfloat16) for layer in late}
    return RidgeMaps([SplitMaps(split, {layer: matrix() for layer in late}, offsets)], layer_count=layers)
