"""LFM2: convolutions with biases, attention in two layers of six, the adjusted width of the feed-forward network."""

from __future__ import annotations

from families.case import Case

CASES = (
    Case(
        "lfm2",
        "lfm2",
        {
            "num_hidden_layers": 6,
            "norm_eps": 1e-5,
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_multiple_of": 8,
            "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention", "conv"],
            "tie_word_embeddings": True,
        },
    ),
)
