"""Phi-3.5-MoE: LongRoPE beyond its original context, biases, a jitter that leaves out some experts and not others."""

from __future__ import annotations

from families.case import Case

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.0, 2.0, 3.5, 5.0],
    "short_mscale": 1.2,
    "long_mscale": 1.2,
    "original_max_position_embeddings": 32,
}
CONFIG = {
    "num_local_experts": 6,
    "attention_bias": True,
    "lm_head_bias": True,
    "router_jitter_noise": 0.3,
    "rope_parameters": LONGROPE,
}
# Its router is a linear layer, which "all-linear" means too, and whose result peft cannot add to.
PEFT = {
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
CASES = (
    Case("phimoe", "phimoe", CONFIG, peft=PEFT),
    Case(
        "phimoe_window",
        "phimoe",
        {"num_local_experts": 4, "sliding_window": 7, "router_jitter_noise": 0.1},
        variant=True,
    ),
)
