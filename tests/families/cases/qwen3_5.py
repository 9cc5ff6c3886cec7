"""Qwen3.5's text model: delta nets with two value heads a key head, decays of every size, gated attention."""

from __future__ import annotations

from families.case import Case
from families.decays import decays

DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
CASES = (
    Case(
        "qwen3_5",
        "qwen3_5_text",
        {
            **DELTA,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000.0,
                "partial_rotary_factor": 0.25,
                "mrope_section": [1, 1, 0],
                "mrope_interleaved": True,
            },
        },
        randomise=decays,
    ),
)
