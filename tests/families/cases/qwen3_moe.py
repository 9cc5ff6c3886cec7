"""Qwen3 MoE: a dense layer among sparse ones, weights renormalised and not."""

from __future__ import annotations

from families.case import Case

EXPERTS = {"head_dim": 8, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3}
CASES = (
    Case("qwen3_moe", "qwen3_moe", {**EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    Case("qwen3_moe_raw_weights", "qwen3_moe", {**EXPERTS, "decoder_sparse_step": 2}),
)
