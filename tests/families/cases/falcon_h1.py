"""Falcon-H1: every multiplier different from one; gated only, and normalised group by group before the gate or after
it."""

from __future__ import annotations

from families.case import Case
from families.decays import decays

CONFIG = {
    "num_hidden_layers": 2,
    "mamba_d_ssm": 48,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
    "mamba_chunk_size": 32,
    "projectors_bias": True,
    "attention_bias": True,
    "lm_head_multiplier": 0.7,
    "embedding_multiplier": 1.3,
    "mlp_multipliers": [0.8, 1.2],
    "key_multiplier": 0.6,
    "attention_out_multiplier": 0.9,
    "attention_in_multiplier": 1.1,
    "ssm_multipliers": [0.7, 1.2, 0.9, 1.3, 0.8],
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.8,
}
PEFT = {"target_modules": r".*\.(in_proj|[qkvo]_proj|(gate|up|down)_proj)"}  # it refuses the mixer's out_proj
CASES = tuple(
    Case(name, "falcon_h1", {**CONFIG, **switches}, randomise=decays, peft=PEFT, variant=bool(switches))
    for name, switches in {
        "falcon_h1": {},
        "falcon_h1_norm_first": {"mamba_rms_norm": True, "mamba_norm_before_gate": True},
        "falcon_h1_gate_first": {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    }.items()
)
