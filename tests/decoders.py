"""Tiny decoders with random weights, one per anatomy, built from the configuration classes of transformers.

`FILLED` and `RECURRENT` must be filled, `REFUSED` must be answered exactly with a reason, `EITHER` may be one or the
other but never wrong. Each entry has 4 layers of width 64 and builds in milliseconds:

    model = FILLED["llama"].build()
    output = model(token_ids(rows=40), use_cache=True)
    states_of(output)["2.keys"]

`CORE` names a few of `FILLED` that between them hold every property; for tests that compile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Cache, PreTrainedModel

from ridgefill_compile.zoo.shrink import enliven, token_ids
from ridgefill_compile.zoo.sizes import VOCABULARY

__all__ = ["VOCABULARY", "enliven", "token_ids"]  # what tests want of a toy model, beside what is defined here

LAYERS = 4
WINDOW = 24  # of sliding layers: shorter than the prompts of most tests


def cache_of(output: Any) -> Cache | None:
    """The cache of a model output; its name changed from `past_key_values` to `cache`."""
    cache: Cache | None = output["cache"] if "cache" in output else output.get("past_key_values")
    return cache


def states_of(output: Any) -> dict[str, torch.Tensor]:
    """Every tensor in the cache of a model output, by layer and name: "0.keys", "0.values", "1.keys", ..."""
    cache = cache_of(output)
    return {
        f"{index}.{name}": value
        for index, layer in enumerate(cache.layers if cache is not None else ())
        for name, value in vars(layer).items()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    }


@dataclass(frozen=True)
class Architecture:
    """A model type of transformers at toy size.

    Attributes:
        kind: model type, a key of `transformers.CONFIG_MAPPING`.
        settings: configuration entries beside the sizes that all share.
        why: what this one is here for.
    """

    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""

    def build(self, seed: int = 0, **settings: Any) -> PreTrainedModel:
        """A model in eval mode, fp32, on the CPU; `settings` override the registry's."""
        config = CONFIG_MAPPING[self.kind](**{**_SIZES, **self.settings, **settings})
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        enliven(model, seed)
        model.eval()
        return model


_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,  # so that generation never stops early
}
_GROUPED = {"num_key_value_heads": 2}
_HEADS = {"num_key_value_heads": 2, "head_dim": 24}  # heads * head_dim is not the width
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW}
_LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
}

FILLED: dict[str, Architecture] = {
    "llama": Architecture("llama", _GROUPED, "pre-norm, grouped-query"),
    "llama_mha": Architecture("llama", {"attention_bias": True, "mlp_bias": True}, "multi-head, biases"),
    "llama_mqa": Architecture("llama", {"num_key_value_heads": 1}, "multi-query"),
    "llama_tied": Architecture("llama", {**_HEADS, "tie_word_embeddings": True}, "embedding used twice"),
    "llama_eager": Architecture("llama", {**_GROUPED, "attn_implementation": "eager"}, "attention spelt out"),
    "qwen2": Architecture("qwen2", _GROUPED, "biases on queries, keys and values"),
    "qwen3": Architecture("qwen3", _HEADS, "norms on queries and keys"),
    "gemma": Architecture("gemma", _HEADS, "scaled embedding, norm weight plus one"),
    "gemma2": Architecture(
        "gemma2",
        {
            **_HEADS,
            **_ALTERNATING,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 10.0,
        },
        "sandwich norms, softcap, every other layer sliding",
    ),
    "gemma3_text": Architecture(
        "gemma3_text",
        {**_HEADS, **_ALTERNATING, "query_pre_attn_scalar": 16},
        "sandwich norms, two rotary bases",
    ),
    "vaultgemma": Architecture("vaultgemma", {**_HEADS, **_ALTERNATING}, "softcap, sliding"),
    "mistral": Architecture("mistral", {**_HEADS, "sliding_window": WINDOW}, "every layer sliding"),
    "mistral_wide": Architecture("mistral", {**_HEADS, "sliding_window": 1024}, "window beyond most prompts"),
    "mistral_full": Architecture("mistral", {**_HEADS, "sliding_window": None}, "no window"),
    "ministral": Architecture("ministral", {**_HEADS, **_ALTERNATING}, "sliding and full"),
    "phi": Architecture("phi", {}, "parallel, half rotary, biases everywhere, a bias on the logits"),
    "phi3": Architecture("phi3", _GROUPED, "fused query-key-value and gate-up projections"),
    "gpt2": Architecture("gpt2", {}, "learned positions, transposed weights, fused projection"),
    "gpt_neox": Architecture("gpt_neox", {}, "parallel, quarter rotary, projection fused head by head"),
    "gpt_neox_sequential": Architecture("gpt_neox", {"use_parallel_residual": False}, "the same in sequence"),
    "gpt_neo": Architecture(
        "gpt_neo",
        {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
        "local layers from a mask buffer, unscaled attention",
    ),
    "gpt_bigcode": Architecture("gpt_bigcode", {}, "multi-query from one fused projection"),
    "gptj": Architecture("gptj", {"rotary_dim": 8}, "parallel, interleaved partial rotary"),
    "codegen": Architecture("codegen", {"rotary_dim": 8}, "parallel, projection fused in blocks"),
    "opt": Architecture("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}, "positions counted from the mask"),
    "opt_post": Architecture(
        "opt",
        {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
        "the residual is normed, the embedding projected",
    ),
    "bloom": Architecture("bloom", {}, "ALiBi, projection fused head by head, residual added inside"),
    "mpt": Architecture("mpt", {}, "ALiBi, fused projection, no biases"),
    "biogpt": Architecture("biogpt", {}, "learned positions, scaled embedding"),
    "xglm": Architecture(
        "xglm",
        {"d_model": 64, "ffn_dim": 96, "attention_heads": 4, "num_layers": LAYERS},
        "sinusoidal positions, heads folded into the batch",
    ),
    "falcon": Architecture("falcon", {"ffn_hidden_size": 96}, "parallel, multi-query, one fused projection"),
    "falcon_grouped": Architecture(
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 96},
        "two parallel norms",
    ),
    "falcon_alibi": Architecture(
        "falcon",
        {"alibi": True, "parallel_attn": False, "bias": True, "ffn_hidden_size": 96},
        "ALiBi, sequential",
    ),
    "cohere": Architecture("cohere", {**_GROUPED, "logit_scale": 0.5}, "parallel, interleaved rotary"),
    "cohere_qk_norm": Architecture("cohere", {**_GROUPED, "logit_scale": 0.5, "use_qk_norm": True}, "a norm per head"),
    "cohere2": Architecture(
        "cohere2",
        {**_HEADS, **_ALTERNATING, "logit_scale": 0.5},
        "parallel, full layers without rotary",
    ),
    "olmo": Architecture("olmo", {**_GROUPED, "clip_qkv": 2.0}, "norms without weights, clipped projections"),
    "olmo2": Architecture("olmo2", _GROUPED, "norms after the branches, norm over all heads"),
    "olmo3": Architecture("olmo3", {**_GROUPED, **_ALTERNATING}, "norms after the branches, sliding"),
    "stablelm": Architecture("stablelm", {**_GROUPED, "use_qkv_bias": True}, "quarter rotary, biases"),
    "stablelm_parallel": Architecture(
        "stablelm",
        {**_GROUPED, "use_parallel_residual": True, "qk_layernorm": True},
        "parallel on one norm, a norm per head",
    ),
    "starcoder2": Architecture("starcoder2", {**_GROUPED, "sliding_window": None}, "layer norms, biases"),
    "glm": Architecture("glm", {**_HEADS, "attention_bias": True}, "half rotary, interleaved, fused gate-up"),
    "glm4": Architecture("glm4", _HEADS, "sandwich norms, half rotary"),
    "granite": Architecture("granite", {**_GROUPED, **_GRANITE}, "scaled residual branches"),
    "smollm3": Architecture("smollm3", {**_GROUPED, "no_rope_layers": [1, 0, 1, 0]}, "layers without rotary"),
    "exaone4": Architecture("exaone4", {**_GROUPED, **_ALTERNATING}, "norms after the branches, sliding"),
    "nemotron": Architecture("nemotron", _GROUPED, "squared ReLU, layer norm weight plus one"),
    "persimmon": Architecture("persimmon", {}, "fused projection, norm per head, partial rotary"),
    "arcee": Architecture("arcee", _GROUPED, "squared ReLU"),
    "apertus": Architecture("apertus", _GROUPED, "learned activation, norms on queries and keys"),
    "helium": Architecture("helium", {**_GROUPED, "head_dim": 16}, "interleaved rotary"),
    "hunyuan_v1_dense": Architecture("hunyuan_v1_dense", _HEADS, "norms after rotary"),
    "seed_oss": Architecture("seed_oss", _HEADS, "biases"),
    "ernie4_5": Architecture("ernie4_5", _HEADS, "interleaved rotary, tied"),
    "bitnet": Architecture("bitnet", _GROUPED, "norms inside the branches"),
    "nanochat": Architecture("nanochat", _GROUPED, "norms without weights, on the embedding too"),
    "modernbert-decoder": Architecture(
        "modernbert-decoder",
        {"layer_types": _ALTERNATING["layer_types"], "local_attention": 2 * WINDOW},
        "norm on the embedding, a first layer without one",
    ),
    "jais2": Architecture("jais2", _GROUPED, "layer norms, squared ReLU, biases"),
    "hyperclovax": Architecture("hyperclovax", _HEADS, "sandwich norms, multipliers"),
    "cwm": Architecture("cwm", {**_HEADS, **_ALTERNATING}, "sliding and full"),
    "mixtral": Architecture("mixtral", {**_GROUPED, "num_local_experts": 4}, "experts"),
    "qwen3_moe": Architecture("qwen3_moe", {**_HEADS, **_EXPERTS}, "experts"),
    "olmoe": Architecture("olmoe", {**_GROUPED, **_EXPERTS}, "experts"),
    "gpt_oss": Architecture(
        "gpt_oss",
        {**_HEADS, **_ALTERNATING, "num_local_experts": 4, "num_experts_per_tok": 2},
        "experts, sinks",
    ),
    "deepseek_v3": Architecture(
        "deepseek_v3",
        {
            **_LATENT,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
        "experts, latent attention",
    ),
}

CORE: tuple[str, ...] = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "mistral",
    "phi",
    "phi3",
    "gpt2",
    "gpt_neox",
    "opt",
    "opt_post",
    "bloom",
    "falcon",
    "olmo2",
    "gpt_neo",
    "mixtral",
)

RECURRENT: dict[str, Architecture] = {
    "mamba": Architecture("mamba", {"state_size": 8}, "recurrent"),
    "mamba2": Architecture(
        "mamba2",
        {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 16},
        "recurrent",
    ),
    "qwen3_next": Architecture(
        "qwen3_next",
        {**_HEADS, **_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 32},
        "recurrent layers and experts",
    ),
    "qwen3_5_text": Architecture("qwen3_5_text", {**_HEADS, **_DELTA}, "recurrent layers"),
    "jamba": Architecture(
        "jamba",
        {
            **_GROUPED,
            "num_experts": 1,
            "mamba_d_state": 8,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "use_mamba_kernels": False,
        },
        "recurrent layers",
    ),
    "bamba": Architecture(
        "bamba",
        {
            **_GROUPED,
            "attn_layer_indices": [1, 3],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 16,
        },
        "recurrent layers",
    ),
    "falcon_h1": Architecture(
        "falcon_h1",
        {
            **_GROUPED,
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "mamba_chunk_size": 16,
        },
        "attention and recurrence side by side",
    ),
}

REFUSED: dict[str, Architecture] = {
    "openai-gpt": Architecture("openai-gpt", {}, "no cache"),
}

EITHER: dict[str, Architecture] = {
    "gemma3n_text": Architecture(
        "gemma3n_text",
        {
            **_HEADS,
            **_ALTERNATING,
            "num_kv_shared_layers": 1,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": None,
        },
        "several residual streams, a layer that shares keys and values",
    ),
    "minicpm3": Architecture("minicpm3", {**_LATENT, "dim_model_base": 32}, "latent attention, dense"),
    "youtu": Architecture("youtu", _LATENT, "latent attention, dense"),
    "diffllama": Architecture("diffllama", _GROUPED, "difference of two attentions"),
    "granite_swa": Architecture("granite_swa", {**_GROUPED, **_ALTERNATING, **_GRANITE}, "sinks"),
    "gemma4_text": Architecture(
        "gemma4_text",
        {
            **_HEADS,
            **_ALTERNATING,
            "global_head_dim": 32,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
        },
        "an embedding per layer, two head widths",
    ),
    "gemma4_text_shared": Architecture(
        "gemma4_text",
        {
            **_HEADS,
            **_ALTERNATING,
            "global_head_dim": 32,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
        },
        "late layers that write no state",
    ),
    "lfm2": Architecture("lfm2", {**_GROUPED, "layer_types": ["conv", "full_attention"] * 2}, "convolutions"),
    "ctrl": Architecture("ctrl", {"dff": 96}, "the graph breaks"),
}
