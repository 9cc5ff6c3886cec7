"""EXAONE 4.0: windows with, and the whole past without a rotary embedding; one kind of layer in a second case."""

from __future__ import annotations

from families.case import Case

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

CASES = (
    Case("exaone4", "exaone4", {"head_dim": 12, "sliding_window": 6, "sliding_window_pattern": 4}),
    Case(
        "exaone4_full",
        "exaone4",
        {"head_dim": 8, "sliding_window": None, "layer_types": ["full_attention"] * 4, "rope_parameters": LLAMA3},
        variant=True,
    ),
)
