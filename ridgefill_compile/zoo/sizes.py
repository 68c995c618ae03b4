"""What a tiny decoder's configuration entries are called and how large they become: data, no code.

Entries are known by name, since configurations have no types that would tell a width from a head count. A name that is
in no table keeps its value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VOCABULARY = 199  # a prime, so that no size is taken for another
LAYERS = 4  # at least; more where that many are needed to show every kind of layer
WINDOW = 24  # shorter than the prompts of the checks
HIDDEN = 64

# Entries that become a fixed number where they are larger than it. Zero and None keep meaning "there is none".
SIZES: Mapping[int, tuple[str, ...]] = {
    HIDDEN: (
        "hidden_size", "hidden_size_global", "adapter_in_dim", "adapter_out_dim",
        "adapter_input_size", "d_model", "n_embd", "emb_dim", "embedding_dim",
    ),
    96: (
        "intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "dff", "dim_ff", "d_inner",
        "feed_forward_size", "ffn_hidden_size", "intermediate_size_mlp", "dense_intermediate_size",
        "prefix_dense_intermediate_size",
    ),
    32: (
        "moe_intermediate_size", "shared_expert_intermediate_size", "shared_experts_intermediate_size",
        "shared_intermediate_size", "expert_ffn_hidden_size", "moe_shared_expert_intermediate_size",
        "moe_latent_size", "rel_extent", "relative_max_distance", "position_bias_num_buckets",
        "prompt_mid_dim",
    ),
    4: (
        "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads",
        "encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads",
        "swa_num_attention_heads", "num_attention_heads_per_layer", "linear_num_heads",
        "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "zero_expert_num",
        "time_step_rank", "mamba_dt_rank", "laurel_rank", "indexer_n_heads", "index_n_heads", "o_groups",
    ),
    2: (
        "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k",
        "n_group", "num_expert_group", "n_groups", "mamba_n_groups", "mamba_ngroups",
        "decoder_sparse_step", "attn_layer_period", "expert_layer_period", "moe_layer_interval", "layer_group_size",
        "interleave_moe_layer_step", "global_attn_every_n_layers", "no_rope_layer_interval",
        "sliding_window_pattern", "n_layers_per_attn_res_block", "rescale_every", "max_window_layers",
        "altup_num_inputs", "hc_mult", "hc_count", "linear_num_key_heads", "index_topk_blocks", "num_random_blocks",
        "num_kv_shared_layers", "num_shared_experts", "n_shared_experts", "moe_num_shared_experts",
        "H_cycles", "L_cycles", "num_layers_per_stack", "n_recurrent_loops", "loop_num_passes",
    ),
    1: (
        "first_k_dense_replace", "num_dense_layers", "attn_layer_offset", "expert_layer_offset", "topk_group",
        "moe_layer_start_index", "num_nextn_predict_layers", "num_mtp_layers", "n_input_layers", "n_output_layers",
        "loop_layer_index_start",
    ),
    8: (
        "qk_rope_head_dim", "n_mamba_heads", "state_size", "mamba_d_state", "ssm_state_size",
        "mamba_n_heads", "mamba_num_heads", "hidden_size_per_layer_input", "d_rel", "adapter_rank", "hc_lowrank",
        "gated_norm_rank", "loop_gate_rank", "index_block_size", "num_buckets", "router_hidden_size", "o_lora_rank",
        "heads_per_ngram", "prompt_length", "prompt_types", "segment_types", "ple_embed_dim", "block_multiple_of",
    ),
    16: (
        "qk_nope_head_dim", "v_head_dim", "kv_lora_rank", "mamba_d_head", "mamba_head_dim", "mamba_headdim",
        "linear_key_head_dim", "linear_head_dim", "index_head_dim", "indexer_head_dim", "chunk_size",
        "mamba_chunk_size", "local_attn_chunk_length", "lsh_attn_chunk_length",
        "query_pre_attn_scalar", "block_size", "d_head", "kv_channels", "dim_head", "attention_head_size",
    ),
    WINDOW: (
        "sliding_window", "sliding_window_size", "attention_window_size", "local_attention_window_len", "window_size",
        "attention_chunk_size", "keep_window_size", "q_lora_rank", "index_topk", "indexer_budget",
    ),
    2 * WINDOW: ("local_attention",),
    2 * HIDDEN: ("mamba_d_ssm",),  # = heads * head size
    2048: (
        "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length", "context_length",
        "max_target_positions", "max_source_positions",
    ),
    VOCABULARY: (
        "vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size", "decoder_vocab_size",
        "shape_vocab_size", "pronunciation_vocab_size", "audio_vocab_size", "encoder_hash_byte_group_vocab",
        "ngram_vocab_size_base", "output_vocab_size",
    ),
}  # fmt: skip

# Entries that keep their ratio to the hidden size, rounded to 8.
WIDTHS = (
    "embedding_size", "input_embedding_size", "output_embedding_size", "word_embed_proj_dim", "attention_hidden_size",
    "lru_width", "dim_model_base", "shape_embed_dim", "pronunciation_embed_dim",
)  # fmt: skip

# Entries that count layers.
LAYER_COUNTS = (
    "decoder_layers", "num_decoder_layers", "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers",
    "num_encoder_layers", "num_blocks", "n_recurrent_layers",
)  # fmt: skip

# Lists of layer numbers.
LAYER_NUMBERS = (
    "attn_layer_indices", "hybrid_layer_ids", "local_layer_ids", "cross_attention_layers", "full_attn_idxs",
    "mlp_only_layers", "moe_layers", "ple_layer_ids",
)  # fmt: skip

# Key heads: one stays one, as many as query heads stay as many, and what lies between becomes 2.
KEY_HEADS: Mapping[str, str] = {
    "num_key_value_heads": "num_attention_heads",
    "num_kv_heads": "num_attention_heads",
    "kv_n_heads": "n_heads",
    "swa_num_key_value_heads": "swa_num_attention_heads",
    "num_query_groups": "num_attention_heads",
    "indexer_kv_heads": "indexer_n_heads",
}

# Per type, what the rules above miss. Dotted names reach nested configurations.
_ATTENTION_LAST = ["linear_attention", "full_attention"] * 2
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    # The class defaults leave out what the class cannot do without.
    "blt": {"num_hidden_layers": LAYERS},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {
        "attn_config.rope_theta": 10000.0, "attn_config.kv_n_heads": 2, "attn_config.clip_qkv": 8.0,
        "ffn_config.hidden_size": HIDDEN,
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 24},
    "hunyuan_v1_moe": {"head_dim": 24},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "ministral": {"head_dim": 24},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": (indexer := {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 24, "indexer_budget": WINDOW,
        "indexer_compress_ratio": 4,
    }),
    "qwen4_exp": {f"text_config.{name}": value for name, value in indexer.items()},
    "xmod": {"default_language": "en_XX"},
    # The class defaults show one kind of layer only.
    "bamba": {"attn_layer_indices": [1, 3]},
    "deepseek_v4": {
        "layer_types": ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"] * 2,
        "mlp_layer_types": ["hash_moe", "moe", "moe", "hash_moe", "moe", "moe"], "num_hidden_layers": 6,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}, "index_topk": 8,
    },
    "granitemoehybrid": {"layer_types": _ATTENTION_LAST},
    "laguna": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "mellum": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "zaya": {"layer_types": ["hybrid_sliding", "hybrid"] * 2, "sliding_window": WINDOW},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},  # weights are shared between two at least
    # Sizes that must multiply or add up to one another.
    "dots3_note_text": {"head_dim": 40},  # of sliding layers, whose heads are wider
    "dots3_note": {"text_config.head_dim": 40},
    "dory": {  # its files count an attention and an MLP as a layer each
        "num_hidden_layers": 12, "n_input_layers": 4, "n_recurrent_layers": 4, "n_output_layers": 4,
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp"] * 3,
    },
    "falcon_h1": {"mamba_d_head": 16},
    "hrm_text": {"num_hidden_layers": 12},  # layers of a stack * H cycles * (L cycles + 1)
    "inkling2_loop_text": {
        "num_hidden_layers": 6, "layer_types": ["hybrid_sliding", "hybrid"] * 3, "loop_layer_index_start": 2,
        "loop_layer_index_end": 4,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16},  # = hidden size * expand
    "reformer": {"axial_pos_embds_dim": [16, HIDDEN - 16], "axial_pos_shape": [8, 256]},
    "xlstm": {"hidden_size": 2 * HIDDEN, "embedding_dim": 2 * HIDDEN},  # query widths are rounded up to 64
}  # fmt: skip

# Types of the causal-LM mapping that are no text decoders by themselves.
NOT_TEXT_DECODERS: Mapping[str, str] = {
    "gemma3n": "a wrapper whose vision tower needs timm; its text decoder is gemma3n_text",
    "gemma4_assistant": "a drafter: reads another model's hidden states and cache",
    "gemma4_unified_assistant": "a drafter: reads another model's hidden states and cache",
    "musicgen": "decodes audio codebooks, not text",
    "musicgen_melody": "decodes audio codebooks, not text",
}
