"""GPT-NeoX: parallel blocks with two norms, in new and old fields, and blocks in sequence."""

from __future__ import annotations

from families.case import Case

CASES = (
    Case("gpt_neox", "gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 1000}),
    Case(
        "gpt_neox_sequential",
        "gpt_neox",
        {
            "use_parallel_residual": False,
            "attention_bias": False,
            "hidden_act": "gelu_new",
            "rope_parameters": {
                "rope_type": "linear",
                "factor": 2.0,
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.25,
            },
        },
    ),
)
