"""StarCoder 2 with its window, and without biases."""

from __future__ import annotations

from families.case import Case

CASES = (
    Case("starcoder2", "starcoder2", {"sliding_window": 6}),
    Case("starcoder2_plain", "starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
)
