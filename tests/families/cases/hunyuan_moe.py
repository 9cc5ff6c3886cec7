"""Hunyuan with experts: normalised after rotation, a base frequency stretched by alpha."""

from __future__ import annotations

from families.case import Case

CASES = (
    Case(
        "hunyuan_v1_moe",
        "hunyuan_v1_moe",
        {
            "num_experts": 8,
            "moe_topk": 3,
            "head_dim": 8,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 20.0, "factor": 1.0},
        },
        # peft cannot load adapters on a shared expert beside routed ones (docs/experts.md).
        targets=("q_proj", "k_proj", "v_proj", "o_proj"),
    ),
)
