"""GLM-4 with and without norms after its blocks, and with YaRN over the rotated half of heads."""

from __future__ import annotations

from families.case import Case

CASES = (
    Case("glm4", "glm4", {"head_dim": 16}),
    Case("glm", "glm", {"head_dim": 16}, variant=True),
    Case(
        "glm4_yarn",
        "glm4",
        {
            "head_dim": 8,
            "attention_bias": False,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "partial_rotary_factor": 0.5,
            },
        },
        variant=True,
    ),
)
