"""Command R with norms for each head's queries and keys and a separate head, and without either."""

from __future__ import annotations

from families.case import Case

CASES = (
    Case(
        "cohere",
        "cohere",
        {"use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": False, "logit_scale": 0.3},
    ),
    Case("cohere_tied", "cohere", {"use_qk_norm": False, "logit_scale": 0.0625, "rope_theta": 8000.0}),
)
