"""gpt-oss: sinks, windows, biases everywhere, a clamp that bites, YaRN without rounded bounds."""

from __future__ import annotations

from families.case import Case

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 16.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 32,
}

CASES = (
    Case(
        "gpt_oss",
        "gpt_oss",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "sliding_window": 7,
            "swiglu_limit": 1.5,
            "rope_parameters": YARN,
        },
        peft={"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
        meshes=({"fsdp": 2, "tp": 2}, {"ep": 2, "tp": 2}, {"fsdp": 2, "cp": 2}),
    ),
)
