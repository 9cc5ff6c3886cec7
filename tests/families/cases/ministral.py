"""Ministral 3's growing queries and YaRN, far beyond the original context; Ministral's windows by layer type."""

from __future__ import annotations

from families.case import Case

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.4,
}

CASES = (
    Case("ministral3", "ministral3", {"head_dim": 12, "rope_parameters": YARN}),
    Case(
        "ministral3_window", "ministral3", {"head_dim": 8, "rope_parameters": YARN, "sliding_window": 7}, variant=True
    ),
    Case(
        "ministral",
        "ministral",
        {
            "head_dim": 8,
            "sliding_window": 6,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"],
        },
        variant=True,
    ),
)
