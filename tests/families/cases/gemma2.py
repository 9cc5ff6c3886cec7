"""Gemma 2: soft caps that bite, its own query scale, windows in every other layer."""

from __future__ import annotations

from families.case import Case

CASES = (
    Case(
        "gemma2",
        "gemma2",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 11,
            "sliding_window": 6,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
    ),
)
