"""dots.llm1: Qwen3's attention with DeepSeek V3's router and shared experts (https://arxiv.org/abs/2506.05767)."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshtune.families import qwen3
from meshtune.families.config_fields import ConfigFields
from meshtune.families.experts import CORRECTION, are_sparse, expert_modules, shared_modules, sigmoid_experts
from meshtune.families.family import Family
from meshtune.families.llama import MODULES, OUTSIDE, attention_spec, decoder_spec, mlp_spec, norm_spec
from meshtune.families.tensors import TensorMap, one_to_one
from meshtune.model.layer import LayerSpec
from meshtune.model.spec import ModelSpec

DEFAULTS = {"routed_scaling_factor": 1.0, "first_k_dense_replace": 0, "norm_topk_prob": False}

DESCRIPTIONS = {
    "dots1": Family(
        title="dots.llm1",
        special="128 experts, of which 6 compute a token, and 2 shared ones",
        models=("rednote-hilab/dots.llm1.inst",),
        group="mixture of experts",
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """Dots1Config -> ModelSpec."""
    fields = ConfigFields(DEFAULTS | config, where)
    bias, window = bool(fields.get("attention_bias", False)), fields.get("sliding_window")
    if "sliding_window" not in config:
        window = 4096
    attention = attention_spec(fields, qkv_bias=bias, out_bias=bias, qk_norm=norm_spec(fields))
    first = fields.get("max_window_layers", 62)
    kinds = fields.layer_types(
        ("full_attention", "sliding_attention"),
        default=lambda index: "sliding_attention" if window is not None and index >= first else "full_attention",
    )
    mlp, experts = mlp_spec(fields), sigmoid_experts(fields)
    layers = [
        LayerSpec(
            dataclasses.replace(attention, window=window if kind == "sliding_attention" else None),
            experts if is_sparse else mlp,
            norm_spec(fields),
        )
        for kind, is_sparse in zip(kinds, are_sparse(fields), strict=True)
    ]
    return decoder_spec(fields, "dots1", "Dots1ForCausalLM", layers)


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors; routed experts by themselves or fused."""
    mixture = {**expert_modules(spec), **shared_modules("shared_experts"), **CORRECTION}
    return one_to_one(spec, {**MODULES, **qwen3.NORMS, **mixture}, OUTSIDE)
