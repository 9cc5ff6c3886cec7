"""DeepSeek V3, V2 and GLM-4.7-Flash: dense and sparse layers, groups of experts, latent and direct queries, YaRN."""

from __future__ import annotations

from families.case import Case

LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
MESHES = ({"fsdp": 2, "tp": 2}, {"ep": 2, "tp": 2}, {"fsdp": 2, "cp": 2})

CASES = (
    Case(
        "deepseek_v3",
        "deepseek_v3",
        LATENT
        | {
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "attention_bias": True,
            "rope_parameters": YARN,
        },
        meshes=MESHES,
    ),
    Case(
        "deepseek_v3_no_query_latents",
        "deepseek_v3",
        LATENT | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_interleave": False, "v_head_dim": 16},
        meshes=MESHES,
    ),
    Case(
        "deepseek_v2",
        "deepseek_v2",
        LATENT
        | {
            "first_k_dense_replace": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "head_dim": None,
        },
        meshes=MESHES,
    ),
    Case("deepseek_v2_lite", "deepseek_v2", LATENT | {"q_lora_rank": None, "topk_method": "greedy"}, meshes=MESHES),
    Case("glm4_moe_lite", "glm4_moe_lite", LATENT, meshes=MESHES),
)
