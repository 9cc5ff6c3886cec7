"""Granite MoE, without a shared expert and with one, all multipliers unlike one."""

from __future__ import annotations

from families.case import Case

MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.0,
}
CONFIG = {**MULTIPLIERS, "num_local_experts": 6, "num_experts_per_tok": 2, "attention_bias": True}
PEFT = {
    "target_modules": "all-linear",
    "target_parameters": ["block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"],
}
CASES = (Case("granitemoe", "granitemoe", CONFIG, peft=PEFT),)
