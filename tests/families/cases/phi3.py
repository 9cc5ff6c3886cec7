"""Phi-3: partial rotation in a window, LongRoPE within and beyond its original context, and both older forms of it."""

from __future__ import annotations

from families.case import Case

FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.6], "long_factor": [1.0, 2.0, 3.5, 5.0]}
ORIGINAL = {"original_max_position_embeddings": 32}

CASES = (
    Case(
        "phi3",
        "phi3",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            "sliding_window": 7,
        },
    ),
    Case(
        "phi3_longrope",
        "phi3",
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **FACTORS}, **ORIGINAL},
    ),
)
