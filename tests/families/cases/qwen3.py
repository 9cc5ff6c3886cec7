"""Qwen3, with biases and windows in some layers, and with a tied head."""

from __future__ import annotations

from families.case import Case

WINDOWS = {
    "attention_bias": True,
    "head_dim": 8,
    "use_sliding_window": True,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
CASES = (
    Case("qwen3_bias_window", "qwen3", WINDOWS),
    Case("qwen3", "qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
)
