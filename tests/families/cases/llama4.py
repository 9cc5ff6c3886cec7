"""Llama 4: chunks that end within rows, a temperature that grows in layers without rotary embedding, dense layers."""

from __future__ import annotations

from families.case import Case

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIG = {
    "head_dim": 8,
    "intermediate_size": 24,
    "intermediate_size_mlp": 40,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "interleave_moe_layer_step": 2,
    "no_rope_layer_interval": 3,
    "attention_chunk_size": 7,
    "floor_scale": 5,
    "attn_scale": 0.3,
    "rope_parameters": LLAMA3,
}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
PARAMETERS = ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"]
CASES = (
    Case(
        "llama4",
        "llama4_text",
        CONFIG,
        targets=("experts", *ATTENTION),
        peft={"target_modules": list(ATTENTION), "target_parameters": PARAMETERS},
    ),
    Case(
        "llama4_128e",
        "llama4_text",
        {
            **CONFIG,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "moe_layers": [0, 3],
            "attention_bias": True,
        },
        variant=True,
    ),
)
