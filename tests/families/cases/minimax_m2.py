"""MiniMax M2, with half of a head rotated."""

from __future__ import annotations

from families.case import Case

ROPE = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}
CASES = (
    Case(
        "minimax_m2",
        "minimax_m2",
        {"head_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 3, "rope_parameters": ROPE},
    ),
)
