"""Nemotron-H: a layer of each kind but experts, two groups of heads, biases."""

from __future__ import annotations

from families.case import Case
from families.decays import decays

CASES = (
    Case(
        "nemotron_h",
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp", "mlp"],
            "head_dim": 8,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 6,
            "n_groups": 2,
            "chunk_size": 32,
            "use_bias": True,
            "mlp_bias": True,
            "layer_norm_epsilon": 1e-5,
        },
        randomise=decays,
    ),
)
