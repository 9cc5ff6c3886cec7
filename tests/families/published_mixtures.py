"""The fields of config.json as mixtures of experts were published, at small sizes."""

from __future__ import annotations

from typing import Any

WRITTEN = {"torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {
    **WRITTEN,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
}
LLAMA4 = {
    **SIZES,
    "attention_bias": False,
    "attention_chunk_size": 16,
    "attn_scale": 0.1,
    "attn_temperature_tuning": True,
    "cache_implementation": "hybrid",
    "floor_scale": 8,
    "for_llm_compressor": False,
    "head_dim": 8,
    "interleave_moe_layer_step": 1,
    "intermediate_size_mlp": 64,
    "model_type": "llama4_text",
    "moe_layers": [0, 1, 2, 3],
    "no_rope_layers": [1, 1, 1, 0],
    "num_experts_per_tok": 1,
    "num_local_experts": 4,
    "output_router_logits": False,
    "pad_token_id": 18,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 16.0,
        "high_freq_factor": 1.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 32,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "tie_word_embeddings": False,
    "use_qk_norm": True,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": {
        "architectures": ["Llama4ForConditionalGeneration"],
        "boi_token_index": 80,
        "eoi_token_index": 81,
        "image_token_index": 92,
        "model_type": "llama4",
        "text_config": LLAMA4,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0.dev0",
        "vision_config": {"model_type": "llama4_vision_model", "hidden_size": 16, "num_hidden_layers": 2},
    },
}
