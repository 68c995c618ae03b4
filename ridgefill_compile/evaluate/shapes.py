"""Models with random weights in the shape of well-known families: for speed, which does not depend on the weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

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
