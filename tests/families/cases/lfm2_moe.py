"""LFM2's mixture: a dense layer before sparse ones, a correction of the router's choice, weights that are scaled."""

from __future__ import annotations

from families.case import Case

CASES = (
    Case(
        "lfm2_moe",
        "lfm2_moe",
        {
            "norm_eps": 1e-5,
            "conv_bias": True,
            "conv_L_cache": 4,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.5,
            "tie_word_embeddings": True,
        },
        peft={"target_parameters": ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"]},
    ),
)
