<<<<<<< HEAD
"""OLMoE, with clipped queries, keys and values."""
=======
"""OLMoE: norms over all heads, clipping that bites, weights that are not normalised and normalised ones."""
>>>>>>> 9a142e9 (OLMoE, GLM-4.5, dots.llm1, MiniMax-M2 and gpt-oss)

from __future__ import annotations

from families.case import Case

<<<<<<< HEAD
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2}
CASES = (
    Case("olmoe", "olmoe", {**EXPERTS, "clip_qkv": 1.5}),
    Case("olmoe_renormalised", "olmoe", {**EXPERTS, "norm_topk_prob": True, "attention_bias": True}),
=======
MESHES = ({"fsdp": 2, "tp": 2}, {"ep": 2, "tp": 2}, {"fsdp": 2, "cp": 2})

SIZES = {"num_experts": 8, "num_experts_per_tok": 3}

CASES = (
    Case("olmoe", "olmoe", SIZES | {"clip_qkv": 0.8}, meshes=MESHES),
    Case("olmoe_normalised", "olmoe", SIZES | {"norm_topk_prob": True, "attention_bias": True}, meshes=MESHES),
>>>>>>> 9a142e9 (OLMoE, GLM-4.5, dots.llm1, MiniMax-M2 and gpt-oss)
)
