"""ERNIE 4.5, dense: neighbours are rotated, embeddings tied; with biases in a second case."""

from __future__ import annotations

from families.case import Case

CASES = (
    Case("ernie4_5", "ernie4_5", {"head_dim": 12, "tie_word_embeddings": True}),
    Case("ernie4_5_biases", "ernie4_5", {"head_dim": 8, "use_bias": True, "tie_word_embeddings": False}, variant=True),
)
