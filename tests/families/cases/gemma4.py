"""Gemma 4: layers that share keys and values and have a wider network, per-layer embeddings, experts in parallel to the
dense network, heads of two sizes, values that are keys, a rotary embedding of a part of the pairs, a soft cap on logits
that bites, layer scalars."""

from __future__ import annotations

import torch

from families.case import Case

ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 20000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
USUAL = {
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 6,
    "final_logit_softcapping": 5.0,
    "rope_parameters": ROPES,
}


def randomise(name: str, tensor: torch.Tensor) -> bool:
    """Query and key norms small enough that attention, which is not scaled, is no choice of one token."""
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        tensor.copy_(torch.randn_like(tensor) * 0.15 + 0.5)
        return True
    return False


CASES = (
    Case(
        "gemma4",
        "gemma4_text",
        {
            **USUAL,
            "num_hidden_layers": 5,
            "layer_types": ["sliding_attention", *["sliding_attention", "full_attention"] * 2],
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "vocab_size_per_layer_input": 100,
            "hidden_size_per_layer_input": 8,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
        randomise=randomise,
        peft={"exclude_modules": r".*\.router\.proj"},  # a linear layer in transformers; here as other routers
        beyond=60,
        generated=12,
        meshes=({"fsdp": 2, "tp": 2}, {"ep": 2, "cp": 2}),
    ),
    Case(
        "gemma4_dense",
        "gemma4_text",
        {
            **USUAL,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
        },
        randomise=randomise,
        beyond=60,
        generated=12,
        meshes=({"fsdp": 2, "tp": 2}, {"fsdp": 2, "cp": 2}),
    ),
    Case(
        "gemma4_unified",
        "gemma4_unified_text",
        {
            **USUAL,
            "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "num_kv_shared_layers": 0,
        },
        randomise=randomise,
        beyond=60,
        variant=True,
    ),
)
