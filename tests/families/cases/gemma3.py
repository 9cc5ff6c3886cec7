"""Gemma 3's text model: two rotary embeddings, windows, its own query scale, a soft cap on logits that bites."""

from __future__ import annotations

from families.case import Case

CASES = (
    Case(
        "gemma3_text",
        "gemma3_text",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 11,
            "sliding_window": 6,
            "final_logit_softcapping": 5.0,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 20000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
)
