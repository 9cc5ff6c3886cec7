"""OLMoE, with clipped queries, keys and values."""

from __future__ import annotations

from families.case import Case

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2}
CASES = (
    Case("olmoe", "olmoe", {**EXPERTS, "clip_qkv": 1.5}),
    Case("olmoe_renormalised", "olmoe", {**EXPERTS, "norm_topk_prob": True, "attention_bias": True}),
)
