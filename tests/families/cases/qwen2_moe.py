"""Qwen2 MoE: a gated shared expert."""

from __future__ import annotations

from families.case import Case

EXPERTS = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
CASES = (Case("qwen2_moe", "qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 40}),)
