"""Gemma 3n: streams with the second active, networks of several widths, some of them sparse, layers of both
types that share keys and values, per-layer embeddings, a soft cap on logits that bites."""

from __future__ import annotations

from families.case import Case
from families.cases.gemma4 import randomise

USUAL = {
    "head_dim": 8,
    "sliding_window": 6,
    "final_logit_softcapping": 5.0,
    "vocab_size_per_layer_input": 90,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 20000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
CASES = (
    Case(
        "gemma3n",
        "gemma3n_text",
        {
            **USUAL,
            "num_hidden_layers": 6,
            "layer_types": [*["sliding_attention", "sliding_attention", "full_attention"] * 2],
            "num_kv_shared_layers": 3,
            "intermediate_size": [56, 56, 48, 48, 48, 48],
            "activation_sparsity_pattern": [0.7, 0.7, 0.0, 0.0, 0.5, 0.0],
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
        },
        randomise=randomise,
        peft={"exclude_modules": r".*\.altup\..*"},  # vectors here: trained in full, never adapted
        beyond=60,
        generated=12,
        meshes=({"fsdp": 2, "tp": 2}, {"fsdp": 2, "cp": 2}),
    ),
    Case(
        "gemma3n_default",
        "gemma3n_text",
        {
            **USUAL,
            "num_hidden_layers": 12,
            "num_kv_shared_layers": 0,
            "altup_correct_scale": False,
            # Of 5% of 56 numbers, and weights of 0.2, transformers' own float32 is 1e-3 from its float64.
            "intermediate_size": 512,
            "initializer_range": 0.1,
        },
        randomise=randomise,
        beyond=60,
        variant=True,
    ),
)
