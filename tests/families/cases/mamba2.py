"""Mamba-2: two groups of heads, biases everywhere; time steps that their limits change, compared only in logits."""

from __future__ import annotations

from families.case import Case
from families.decays import decays

CONFIG = {
    "num_heads": 8,
    "head_dim": 8,
    "expand": 2,
    "state_size": 6,
    "n_groups": 2,
    "use_bias": True,
    "chunk_size": 32,
    "layer_norm_epsilon": 1e-5,
}
CASES = (
    # peft refuses the mixer's out_proj.
    Case("mamba2", "mamba2", CONFIG, randomise=decays, peft={"target_modules": ["in_proj"]}),
    # While transformers generates, it does not limit time steps.
    Case("mamba2_limits", "mamba2", {**CONFIG, "time_step_limit": (0.3, 1.1)}, randomise=decays, variant=True),
)
