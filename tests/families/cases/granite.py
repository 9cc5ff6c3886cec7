"""Granite: four multipliers, with biases."""

from __future__ import annotations

from families.case import Case

CASES = (
    Case(
        "granite",
        "granite",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "embedding_multiplier": 3.0,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.15,
            "tie_word_embeddings": True,
        },
    ),
)
