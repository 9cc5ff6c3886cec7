"""Arcee Trinity: a dense layer first, windows, scaled embeddings."""

from __future__ import annotations

from families.case import Case

# Its router has a linear layer, which "all-linear" of peft means too; and peft takes every gate_proj, up_proj and
# down_proj to mean the experts.
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
PEFT = {
    "target_modules": list(ATTENTION),
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
CASES = (
    Case(
        "afmoe",
        "afmoe",
        {
            "head_dim": 8,
            "moe_intermediate_size": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "route_scale": 1.7,
            "sliding_window": 7,
            "mup_enabled": True,
        },
        targets=("experts", *ATTENTION),
        peft=PEFT,
    ),
)
