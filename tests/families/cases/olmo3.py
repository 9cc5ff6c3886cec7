"""OLMo 3: both kinds of layers, YaRN in those without a window, in the new and the old form of the config."""

from __future__ import annotations

from families.case import Case

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.2}

CASES = (
    Case(
        "olmo3",
        "olmo3",
        {
            "sliding_window": 6,
            "rope_parameters": {
                "full_attention": {"rope_theta": 500.0, **YARN},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    Case("olmo3_old_fields", "olmo3", {"sliding_window": 6, "rope_theta": 500_000.0, "rope_scaling": YARN}),
)
