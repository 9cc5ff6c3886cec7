"""Command R7B: windows with positions, and layers without either; the pattern in the new and the old field."""

from __future__ import annotations

from families.case import Case

CASES = (
    Case(
        "cohere2",
        "cohere2",
        {
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "logit_scale": 0.3,
        },
    ),
    Case("cohere2_pattern", "cohere2", {"sliding_window": 6, "sliding_window_pattern": 2, "attention_bias": True}),
)
