"""Qwen3-Next: fused projections of delta nets, a mixture of experts in three layers, a dense network in one."""

from __future__ import annotations

from families.case import Case
from families.cases.qwen3_5 import DELTA
from families.decays import decays

CASES = (
    Case(
        "qwen3_next",
        "qwen3_next",
        {
            **DELTA,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 16,
            "mlp_only_layers": [1],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.25},
        },
        randomise=decays,
    ),
)
