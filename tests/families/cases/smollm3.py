"""SmolLM3: layers with and without a rotary embedding; windows and biases in a second case."""

from __future__ import annotations

from families.case import Case

CASES = (
    Case("smollm3", "smollm3", {"no_rope_layers": [1, 0, 1, 1], "tie_word_embeddings": True}),
    Case(
        "smollm3_windows",
        "smollm3",
        {
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 7,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
        variant=True,
    ),
)
