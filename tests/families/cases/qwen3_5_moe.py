"""Qwen3.5's mixtures: every layer sparse with a gated shared expert, alone and inside the vision-language model."""

from __future__ import annotations

import transformers

from families.case import Case
from families.cases.composite import QWEN_VISION
from families.cases.qwen3_5 import DELTA
from families.decays import decays

SPARSE = {
    **DELTA,
    "initializer_range": 0.1,  # with 0.2 the float32 logits of transformers itself are 1.2e-4 from its float64 ones
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}
# peft takes every target that ends in gate_proj, up_proj or down_proj to mean the routed experts.
TARGETS = ("experts", "q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj")
PEFT = {
    "target_modules": [name for name in TARGETS if name != "experts"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
CASES = (
    Case("qwen3_5_moe", "qwen3_5_moe_text", SPARSE, randomise=decays, targets=TARGETS, peft=PEFT),
    Case(
        "qwen3_5_moe_vision",
        "qwen3_5_moe",
        SPARSE,
        text="qwen3_5_moe_text",
        outside={"vision_config": QWEN_VISION, "tie_word_embeddings": False},
        auto_class=transformers.AutoModelForImageTextToText,
        randomise=decays,
        targets=TARGETS,
        peft=PEFT,
    ),
)
