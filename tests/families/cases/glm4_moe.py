<<<<<<< HEAD
"""GLM-4.5: a dense layer first, biases, normalised heads."""
=======
"""GLM-4.5: a dense layer before sparse ones, partial rotation, groups of experts, with and without norms of heads."""
>>>>>>> 9a142e9 (OLMoE, GLM-4.5, dots.llm1, MiniMax-M2 and gpt-oss)

from __future__ import annotations

from families.case import Case

<<<<<<< HEAD
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
=======
MESHES = ({"fsdp": 2, "tp": 2}, {"ep": 2, "tp": 2}, {"fsdp": 2, "cp": 2})

SIZES = {"moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "head_dim": 8}

CASES = (
    Case(
        "glm4_moe",
        "glm4_moe",
        SIZES
        | {"use_qk_norm": True, "attention_bias": True, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5},
        meshes=MESHES,
    ),
    Case("glm4_moe_air", "glm4_moe", SIZES | {"n_shared_experts": 2, "first_k_dense_replace": 2}, meshes=MESHES),
>>>>>>> 9a142e9 (OLMoE, GLM-4.5, dots.llm1, MiniMax-M2 and gpt-oss)
)
