"""GPT-2 with a context of 192 tokens, and with scores scaled by the layer's number."""

from __future__ import annotations

from families.case import Case

SIZES = {"max_position_embeddings": 192}

CASES = (
    Case("gpt2", "gpt2", SIZES),
    Case("gpt2_by_layer", "gpt2", {**SIZES, "n_inner": 56, "scale_attn_by_inverse_layer_idx": True}),
)
