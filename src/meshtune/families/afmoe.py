"""Arcee Trinity (AFMoE): a gate on what attention gives, norms before and after each block, windows with a rotary
embedding in three of four layers, a sigmoid router with a correction."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshtune.families import qwen3
from meshtune.families.config_fields import ConfigFields, read_rope
from meshtune.families.experts import expert_modules, experts_spec, shared_modules, with_shared
from meshtune.families.family import Family
from meshtune.families.llama import MODULES, OUTSIDE, attention_spec, decoder_spec, head_sizes, mlp_spec, norm_spec
from meshtune.families.tensors import Stored, TensorMap, View, one_to_one
from meshtune.model.layer import LayerSpec
from meshtune.model.spec import ModelSpec

FULL, SLIDING = "full_attention", "sliding_attention"
# AfmoeConfig's, where they are not those of the other families.
DEFAULTS = {"head_dim": 128, "rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 6, "sliding_window": 1024}
# What transformers does not read: one value of each is what it computes.
FIXED = {
    "score_func": "sigmoid",
    "route_norm": True,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_groups": 1,
    "num_limited_groups": 1,
}
NORMS = {
    "attn_norm": "input_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_mlp_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}
ROUTER = {
    "mlp/router": "mlp.router.gate",
    "mlp/router/correction": Stored("mlp.expert_bias", "mlp.router.gate", View.identity),
}

DESCRIPTIONS = {
    "afmoe": Family(
        title="Arcee Trinity",
        special="a gate on what attention gives, norms before and after each block; windows and a rotary embedding in "
        "three of four layers, neither in the others; sigmoid router with a correction, shared experts",
        models=("arcee-ai/Trinity-Mini", "arcee-ai/Trinity-Nano-Preview"),
        group="mixture of experts",
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """AfmoeConfig -> ModelSpec."""
    fields = ConfigFields(DEFAULTS | config, where)
    fields.harmless("auto_map", "load_balance_coeff", "use_grouped_mm")
    for name, value in FIXED.items():
        fields.only(name, value)
    bias, norm = bool(fields.get("attention_bias", False)), norm_spec(fields)
    rope = read_rope(fields, head_sizes(fields)[2], theta=10000.0)
    window = fields.integer("sliding_window")
    sliding = attention_spec(fields, rope=rope, window=window, qkv_bias=bias, out_bias=bias, qk_norm=norm, gate="input")
    attention = {SLIDING: sliding, FULL: dataclasses.replace(sliding, window=None, rope=None)}
    interval = fields.integer("global_attn_every_n_layers", 4)
    kinds = fields.layer_types((FULL, SLIDING), lambda index: SLIDING if (index + 1) % interval else FULL)
    router = {
        "scoring": "sigmoid",
        "normalize": True,
        "epsilon": 1e-20,
        "scale": fields.number("route_scale", 1.0),
        "correction": True,
    }
    experts = with_shared(experts_spec(fields, router=router), fields.integer("num_shared_experts", 2))
    dense, first = mlp_spec(fields), fields.get("num_dense_layers", 1)
    layers = [
        LayerSpec(attention[kind], experts if index >= first else dense, norm, "both")
        for index, kind in enumerate(kinds)
    ]
    scale = fields.integer("hidden_size") ** 0.5 if fields.get("mup_enabled", False) else None
    return decoder_spec(fields, "afmoe", "AfmoeForCausalLM", layers, embed_scale=scale)


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors; routed experts by themselves or fused."""
    attention = {**qwen3.NORMS, "attn/gate": "self_attn.gate_proj"}
    mixture = {**expert_modules(spec), **shared_modules("shared_experts"), **ROUTER}
    return one_to_one(spec, {**MODULES, **NORMS, **attention, **mixture}, OUTSIDE)
