"""Nemotron-H: layers of one block each, a Mamba-2 mixer, attention without positions, or a feed-forward network
(https://arxiv.org/abs/2504.03624)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from meshtune.families.config_fields import ConfigFields
from meshtune.families.experts import expert_count, experts_spec, plain_modules
from meshtune.families.family import Family
from meshtune.families.llama import attention_spec, decoder_spec, mlp_spec
from meshtune.families.mamba2 import MODULES as MAMBA
from meshtune.families.mamba2 import OUTSIDE
from meshtune.families.recurrent import LIMITS, layer_kinds, rename_modules, with_mamba_groups
from meshtune.families.tensors import Stored, TensorMap, View, one_to_one
from meshtune.model.experts import ExpertsSpec
from meshtune.model.layer import LayerSpec
from meshtune.model.mamba2 import Mamba2Spec
from meshtune.model.mlp import MlpSpec
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
EXPERTS = {
    "mlp/router": "mixer.gate",
    "mlp/router/correction": Stored("mixer.gate.e_score_correction_bias", "mixer.gate", View.identity),
    "mlp/shared/up": "mixer.shared_experts.up_proj",
    "mlp/shared/down": "mixer.shared_experts.down_proj",
    "mlp/latent_in": "mixer.fc1_latent_proj",
    "mlp/latent_out": "mixer.fc2_latent_proj",
}
# Of the experts, where a model has them.
EXPERT_DEFAULTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
}
# Fields that say how the model was initialised, how transformers computes it, what layers that predict further tokens
# are like, or, in a model without experts, what they would be.
UNUSED = """
    auto_map norm_eps chunk_size mamba_chunk_size expand mamba_expand hybrid_override_pattern layer_types
    layers_block_type
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
        title="Nemotron-H, Nemotron 3",
        special="one block a layer: Mamba-2, attention without positions, a plain network of squared ReLU, or such "
        "experts, of which 6 of 128 compute a token in Nemotron 3 Nano, beside a shared one; no adapters on the "
        "mixer's output, which peft refuses",
        models=(
            "nvidia/Nemotron-H-8B-Base-8K",
            "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
            "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        ),
        group="hybrid",
        limits=LIMITS,
        mixture=True,
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
    kinds = layer_kinds(fields, (*layers, "moe"))
    if "moe" in kinds:
        layers["moe"] = LayerSpec(None, _experts(config, fields, mlp, len(kinds)), norm)
    for unused in UNUSED:
        fields.get(unused)
    return decoder_spec(fields, "nemotron_h", "NemotronHForCausalLM", [layers[kind] for kind in kinds])


def _experts(config: dict[str, Any], fields: ConfigFields, mlp: MlpSpec, layers: int) -> ExpertsSpec:
    """The experts of a layer, which have no gate, and may compute with fewer numbers than the model."""
    absent = EXPERT_DEFAULTS.keys() - config.keys() - ({"n_routed_experts"} if "num_local_experts" in config else set())
    defaults = {name: EXPERT_DEFAULTS[name] for name in absent}
    fields = fields.with_values("experts", num_hidden_layers=layers, **defaults)
    groups, top_groups, experts = fields.integer("n_group", 1), fields.integer("topk_group", 1), expert_count(fields)
    if experts % groups or not top_groups <= groups:
        raise fields.error(
            "n_group",
            f"{top_groups} of {groups} groups are chosen, and there are {experts} experts to divide into them",
        )
    if groups > 1 and experts // groups < 2:
        raise fields.error("n_group", f"{groups} groups of {experts} experts: a group's score is that of its two best")
    latent = fields.get("moe_latent_size")
    return experts_spec(
        fields,
        activation="mlp_hidden_act",
        router={
            "scoring": "sigmoid",
            "normalize": bool(fields.get("norm_topk_prob", True)),
            "epsilon": 1e-20,
            "scale": fields.number("routed_scaling_factor", 1.0),
            "correction": True,
            "groups": groups,
            "top_groups": top_groups,
            "float32": True,
        },
        gated=False,
        shared=dataclasses.replace(mlp, width=fields.integer("moe_shared_expert_intermediate_size")),
        latent=None if latent is None else fields.integer("moe_latent_size"),
        latent_bias=mlp.bias,
    )


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors: each is one leaf, or one layer of it, with the rows of fused projections in groups. Files
    have `backbone.` where transformers' modules have `model.`."""
    modules = MODULES | EXPERTS | plain_modules(spec, "mixer.experts")
    return rename_modules(with_mamba_groups(one_to_one(spec, modules, OUTSIDE), spec), "backbone.", modules=False)
