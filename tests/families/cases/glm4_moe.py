"""GLM-4.5: a dense layer first, biases, normalised heads."""

from __future__ import annotations

from families.case import Case

EXPERTS = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.7,
    "head_dim": 8,
}
CASES = (
    Case("glm4_moe", "glm4_moe", {**EXPERTS, "use_qk_norm": True, "attention_bias": True}),
    Case("glm4_moe_air", "glm4_moe", {**EXPERTS, "n_group": 2, "topk_group": 1, "n_shared_experts": 2}),
)
