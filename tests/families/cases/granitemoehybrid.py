"""Granite 4's hybrid, with experts and without: two groups of heads, every multiplier away
from one."""

from __future__ import annotations

from families.case import Case
from families.cases.granitemoe import PEFT
from families.decays import decays

CONFIG = {
    "num_local_experts": 0,
    "shared_intermediate_size": 56,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
    "mamba_d_conv": 4,
    "mamba_proj_bias": True,
    "mamba_chunk_size": 32,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 1.7,
    "residual_multiplier": 0.6,
    "logits_scaling": 1.5,
}
SPARSE = {**CONFIG, "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24}
CASES = (
    Case("granitemoehybrid", "granitemoehybrid", SPARSE, randomise=decays, peft=PEFT),
    Case("granitemoehybrid_dense", "granitemoehybrid", CONFIG, randomise=decays, meshes=({"fsdp": 2, "tp": 2},)),
)
