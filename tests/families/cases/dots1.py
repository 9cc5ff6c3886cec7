"""dots.llm1: a dense layer first, windows in the last layers."""

from __future__ import annotations

from families.case import Case

CASES = (
    Case(
        "dots1",
        "dots1",
        {
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "sliding_window": 6,
            "max_window_layers": 2,
        },
    ),
)
