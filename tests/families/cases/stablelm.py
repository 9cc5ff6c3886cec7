"""StableLM 2 12B with a norm for each head, and the smaller ones."""

from __future__ import annotations

from families.case import Case

CASES = (
    Case(
        "stablelm",
        "stablelm",
        {
            "use_qkv_bias": True,
            "qk_layernorm": True,
            "use_parallel_residual": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    Case("stablelm_small", "stablelm", {"partial_rotary_factor": 0.25, "rope_theta": 10000.0}),
)
