"""Llama: every variant of its layers, and every kind of rotary embedding."""

from __future__ import annotations

from families.case import Case

ROPE = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


def rope(kind: str, theta: float, **parameters: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **parameters}}


CASES = (
    Case("llama_bias", "llama", {"attention_bias": True, "mlp_bias": True}),
    Case("llama2", "llama", {"num_key_value_heads": 4, **rope("default", 10000.0)}, variant=True),
    Case("llama3", "llama", rope("default", 500000.0), variant=True),
    Case("llama_tied", "llama", {"tie_word_embeddings": True}),
    Case("llama_head_dim", "llama", {"head_dim": 12}, variant=True),
    *(
        Case(f"rope_{name}", "llama", {"rope_parameters": {"rope_theta": 10000.0, **parameters}}, variant=True)
        for name, parameters in ROPE.items()
    ),
)
