"""DeepSeek V2 and V3, Moonlight, Kimi K2's text model and GLM-4.7-Flash: latent attention and routed experts with
shared ones (https://arxiv.org/abs/2405.04434, https://arxiv.org/abs/2412.19437)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from meshtune.families.config_fields import ConfigFields, read_rope
from meshtune.families.experts import (
    CORRECTION,
    are_sparse,
    expert_modules,
    experts_spec,
    read_groups,
    shared_modules,
    sigmoid_experts,
    with_shared,
)
from meshtune.families.family import OVERFLOWS_IN_UNSLOTH, Family
from meshtune.families.llama import MODULES, OUTSIDE, decoder_spec, mlp_spec, norm_spec
from meshtune.families.tensors import TensorMap, one_to_one
from meshtune.model.experts import ExpertsSpec
from meshtune.model.latent_attention import LatentAttentionSpec
from meshtune.model.layer import LayerSpec
from meshtune.model.norm import NormSpec
from meshtune.model.rope import RopeSpec
from meshtune.model.spec import ModelSpec

LATENT_EPS = 1e-6  # of the norms of latents, whatever rms_norm_eps is
ATTENTION = {
    "attn/q_latent": "self_attn.q_a_proj",
    "attn/q_norm": "self_attn.q_a_layernorm",
    "attn/q_heads": "self_attn.q_b_proj",
    "attn/kv_latent": "self_attn.kv_a_proj_with_mqa",
    "attn/kv_norm": "self_attn.kv_a_layernorm",
    "attn/kv_heads": "self_attn.kv_b_proj",
}
ARCHITECTURES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
}
# Of the configs' classes, where they differ from V3's.
DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "routed_scaling_factor": 1.0,
        "n_group": None,
        "topk_group": None,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
    },
    "glm4_moe_lite": {"routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5},
}
V3 = {
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "q_lora_rank": 1536,
}

DESCRIPTIONS = {
    "deepseek_v2": Family(
        title="DeepSeek V2",
        special="latent attention, shared experts, experts chosen in groups",
        models=("deepseek-ai/DeepSeek-V2-Lite-Chat", "deepseek-ai/DeepSeek-Coder-V2-Lite-Instruct"),
        group="latent attention",
        mixture=True,
    ),
    "deepseek_v3": Family(
        title="DeepSeek V3, R1, Moonlight",
        special="latent attention, shared experts, sigmoid router with a correction that balances load",
        models=("deepseek-ai/DeepSeek-V3.1", "moonshotai/Moonlight-16B-A3B-Instruct"),
        group="latent attention",
        mixture=True,
    ),
    "glm4_moe_lite": Family(
        title="GLM-4.7-Flash",
        special="DeepSeek V3's layers with other sizes",
        models=("zai-org/GLM-4.7-Flash",),
        overflow=OVERFLOWS_IN_UNSLOTH,
        group="latent attention",
        mixture=True,
    ),
    "kimi_k2": Family(
        title="Kimi K2",
        special="DeepSeek V3's layers with 384 experts",
        models=("moonshotai/Kimi-K2-Instruct-0905",),
        group="latent attention",
        mixture=True,
    ),
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """DeepseekV2Config, DeepseekV3Config or Glm4MoeLiteConfig -> ModelSpec, with transformers' defaults."""
    kind = config["model_type"]
    fields = ConfigFields(V3 | DEFAULTS.get(kind, {}) | config, where)
    _check_training_fields(fields)
    attention = _attention(fields, always_interleaved=kind == "deepseek_v2")
    dense = LayerSpec(attention, mlp_spec(fields, bias=bool(fields.get("mlp_bias", False))), norm_spec(fields))
    sparse = dataclasses.replace(
        dense, ffn=_softmax_experts(fields) if kind == "deepseek_v2" else sigmoid_experts(fields)
    )
    layers = [sparse if is_sparse else dense for is_sparse in are_sparse(fields)]
    return decoder_spec(fields, kind, ARCHITECTURES[kind], layers)


def _check_training_fields(fields: ConfigFields) -> None:
    """Reads what says how the model was trained, or which remote code it came with, and refuses unknown values."""
    for unused in ("auto_map", "aux_loss_alpha", "seq_aux", "ep_size", "num_nextn_predict_layers", "num_mtp_layers"):
        fields.get(unused)
    fields.only("moe_layer_freq", 1)
    fields.only("num_key_value_heads", fields.integer("num_attention_heads"))


def _attention(fields: ConfigFields, always_interleaved: bool) -> LatentAttentionSpec:
    head_dim, rotated = fields.integer("qk_nope_head_dim", 128), fields.integer("qk_rope_head_dim", 64)
    fields.only("head_dim", rotated)
    fields.only("qk_head_dim", head_dim + rotated)
    interleaved = always_interleaved or bool(fields.get("rope_interleave", True))
    rope = read_rope(fields, rotated, theta=10000.0, rotated=1.0, interleaved=interleaved)
    return LatentAttentionSpec(
        heads=fields.integer("num_attention_heads"),
        head_dim=head_dim,
        value_dim=fields.integer("v_head_dim", 128),
        latent=fields.integer("kv_lora_rank", 512),
        query_latent=fields.get("q_lora_rank"),
        rope=rope,
        norm=NormSpec(LATENT_EPS),
        scale=(head_dim + rotated) ** -0.5 * _magnitude(rope) ** 2,
        bias=bool(fields.get("attention_bias", False)),
    )


def _magnitude(rope: RopeSpec) -> float:
    """YaRN's factor on scores, in place of that on cos and sin: 1 + 0.1 mscale_all_dim ln(factor)."""
    numbers = {name: value for name, value in rope.parameters if isinstance(value, float)}
    share = numbers.get("mscale_all_dim", 0.0)
    return 1.0 + 0.1 * share * math.log(max(1.0, numbers["factor"])) if share else 1.0


def _softmax_experts(fields: ConfigFields) -> ExpertsSpec:
    """Routed experts and a shared one, with V2's softmax router."""
    fields.only("scoring_func", "softmax")
    fields.only("norm_topk_prob", False)
    method = fields.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.error("topk_method", f"topk_method {method!r} is unknown", "known: greedy, group_limited_greedy")
    groups = read_groups(fields)
    grouped = groups if method == "group_limited_greedy" else {}
    scale = fields.number("routed_scaling_factor")
    router = {"normalize": False, "scale": scale, "float32": True, "group_score": 1, **grouped}
    return with_shared(experts_spec(fields, router=router), fields.integer("n_shared_experts", 2))


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors; routed experts by themselves or fused."""
    return one_to_one(
        spec,
        {**MODULES, **ATTENTION, **shared_modules("shared_experts"), **CORRECTION, **expert_modules(spec)},
        OUTSIDE,
    )
