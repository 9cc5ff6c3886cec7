"""Nemotron-H: layers of one block each, a Mamba-2 mixer, attention without positions, or a feed-forward network
(https://arxiv.org/abs/2504.03624)."""

from __future__ import annotations

import math
from typing import Any

from meshtune.families.config_fields import ConfigFields
from meshtune.families.family import Family
from meshtune.families.llama import attention_spec, decoder_spec, mlp_spec
from meshtune.families.mamba2 import MODULES as MAMBA
from meshtune.families.mamba2 import OUTSIDE
from meshtune.families.recurrent import LIMITS, layer_kinds, renamed, with_mamba_groups
from meshtune.families.tensors import TensorMap, one_to_one
from meshtune.model.layer import LayerSpec
from meshtune.model.mamba2 import Mamba2Spec
from meshtune.model.norm import NormSpec
from meshtune.model.spec import ModelSpec

# NemotronHConfig's; published configs leave out what equals them.
DEFAULTS = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "intermediate_size": 21504,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
}
MODULES = MAMBA | {
    "attn_norm": "norm",
    "mlp_norm": "norm",
    **{f"attn/{name}": f"mixer.{name}_proj" for name in ("q", "k", "v", "o")},
    **{f"mlp/{name}": f"mixer.{name}_proj" for name in ("up", "down")},
}
# Fields that say how the model was initialised, how transformers computes it, or what its experts, of which it has
# none, are like.
UNUSED = """
    chunk_size mamba_chunk_size expand mamba_expand hybrid_override_pattern layer_types layers_block_type
    mamba_dt_init_floor mamba_dt_limit mamba_dt_max mamba_ssm_cache_dtype moe_intermediate_size moe_latent_size
    moe_shared_expert_intermediate_size moe_shared_expert_overlap mtp_hybrid_override_pattern
    mtp_layers_block_type n_group n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok
    num_local_experts num_logits_to_keep num_nextn_predict_layers num_query_groups output_router_logits
    rescale_prenorm_residual residual_in_fp32 routed_scaling_factor sliding_window time_step_floor
    time_step_limit time_step_max time_step_rank topk_group use_mamba_kernels rope_theta rope_scaling
    rope_parameters partial_rotary_factor attention_head_dim rms_norm_eps
""".split()

DESCRIPTIONS = {
    "nemotron_h": Family(
        title="Nemotron-H (dense)",
        special="one block a layer: Mamba-2, attention without positions, or a plain network of squared ReLU; models "
        "with experts are not supported yet; no adapters on the mixer's output, which peft refuses",
        models=("nvidia/Nemotron-H-8B-Base-8K", "nvidia/NVIDIA-Nemotron-Nano-9B-v2"),
        group="hybrid",
        limits=LIMITS,
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """NemotronHConfig -> ModelSpec."""
    fields = ConfigFields(DEFAULTS | config, where)
    norm = NormSpec(fields.number("layer_norm_epsilon", 1e-5))
    fields.only("mamba_hidden_act", "silu")
    fields.only("attention_bias", False)
    bias, mlp_bias = bool(fields.get("use_bias", False)), bool(fields.get("mlp_bias", False))
    fields.get("mamba_proj_bias")  # transformers reads use_bias alone
    mamba = Mamba2Spec(
        fields.integer("mamba_num_heads"),
        fields.integer("mamba_head_dim"),
        fields.integer("ssm_state_size"),
        fields.integer("mamba_n_groups", fields.integer("n_groups", 8)),
        fields.integer("mamba_d_conv", fields.integer("conv_kernel", 4)),
        norm,
        filter_bias=bool(fields.get("mamba_conv_bias", fields.get("use_conv_bias", True))),
        in_bias=bias,
        out_bias=bias,
        dt_limit=(fields.number("mamba_dt_min", fields.number("time_step_min", 1e-3)), math.inf),
    )
    mlp = mlp_spec(fields, "mlp_hidden_act", "relu2", gated=False, bias=mlp_bias)
    layers = {
        "linear_attention": LayerSpec(mamba, None, norm),
        "full_attention": LayerSpec(attention_spec(fields, rope=None), None, norm),
        "mlp": LayerSpec(None, mlp, norm),
    }
    kinds = layer_kinds(fields, tuple(layers))
    for unused in UNUSED:
        fields.get(unused)
    return decoder_spec(fields, "nemotron_h", "NemotronHForCausalLM", [layers[kind] for kind in kinds])


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors: each is one leaf, or one layer of it, with the rows of fused projections in groups. Files
    have `backbone.` where transformers' modules have `model.`."""
    return renamed(with_mamba_groups(one_to_one(spec, MODULES, OUTSIDE), spec), "backbone.", modules=False)
