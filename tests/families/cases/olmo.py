"""OLMo: norms without parameters; clipping that bites."""

from __future__ import annotations

from families.case import Case

CASES = (
    Case("olmo", "olmo", {"clip_qkv": 0.7}),
    Case("olmo_tied", "olmo", {"tie_word_embeddings": True, "attention_bias": True}),
)
