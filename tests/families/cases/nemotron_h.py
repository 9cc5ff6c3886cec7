"""Nemotron-H: a layer of each kind, two groups of heads, biases; experts in groups, narrower than the model."""

from __future__ import annotations

import torch

from families.case import Case
from families.decays import decays


def randomise(name: str, tensor: torch.Tensor) -> bool:
    """Corrections that change the choice of experts, and decays as `decays` has them."""
    if name.endswith("e_score_correction_bias"):
        tensor.copy_(torch.randn_like(tensor) * 0.2)
        return True
    return decays(name, tensor)


CASES = (
    Case(
        "nemotron_h_experts",
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp"],
            "head_dim": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "ssm_state_size": 6,
            "n_groups": 2,
            "chunk_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "moe_latent_size": 16,
            "routed_scaling_factor": 2.5,
            "mlp_bias": True,
        },
        randomise=randomise,
        peft={
            "target_modules": r".*\.(in_proj|[qkvo]_proj|fc[12]_latent_proj|(shared_experts|mixer)\.(up|down)_proj)",
            "target_parameters": ["mixer.experts.up_proj", "mixer.experts.down_proj"],
        },
        beyond=70,
        generated=12,
        meshes=({"fsdp": 2, "tp": 2}, {"ep": 2, "fsdp": 2}),
    ),
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
        peft={"target_modules": r".*\.(in_proj|[qkvo]_proj|up_proj|down_proj)"},  # it refuses the mixer's out_proj
        meshes=({"fsdp": 2, "tp": 2},),
    ),
    Case(
        "nemotron_h_nano",
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "head_dim": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "ssm_state_size": 6,
            "n_groups": 1,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 48,
            "norm_topk_prob": False,
        },
        randomise=randomise,
        beyond=70,
        variant=True,
    ),
)
