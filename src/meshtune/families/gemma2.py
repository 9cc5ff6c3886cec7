"""Gemma 2: norms before and after each block, soft caps, sliding windows in every other layer
(https://arxiv.org/abs/2408.00118)."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshtune.families.config_fields import ConfigFields
from meshtune.families.family import OVERFLOWS_IN_VLLM, Family
from meshtune.families.llama import MODULES, OUTSIDE, attention_spec, decoder_spec, mlp_spec
from meshtune.families.tensors import TensorMap, one_to_one
from meshtune.model.layer import LayerSpec
from meshtune.model.norm import NormSpec
from meshtune.model.spec import ModelSpec

NORMS = {
    "attn_norm": "input_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
TANH = "gelu_pytorch_tanh"

DESCRIPTIONS = {
    "gemma2": Family(
        title="Gemma 2",
        special="norms before and after each block, soft caps on scores and logits, windows in every other layer",
        models=("google/gemma-2-2b-it", "google/gemma-2-27b-it"),
        overflow=OVERFLOWS_IN_VLLM,
        template="gemma",
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """Gemma2Config -> ModelSpec, with transformers' defaults for fields that are absent."""
    config = {"head_dim": 256, "tie_word_embeddings": True, "hidden_activation": TANH} | config
    fields = ConfigFields(config, where)
    fields.only("hidden_act", TANH, fields.get("hidden_activation"))  # an older name, of which transformers reads none
    fields.only("use_bidirectional_attention", None, False)
    fields.get("cache_implementation")
    bias = bool(fields.get("attention_bias", False))
    full = attention_spec(
        fields,
        scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        softcap=_softcap(fields, config, "attn_logit_softcapping", 50.0),
        qkv_bias=bias,
        out_bias=bias,
    )
    norm = NormSpec(fields.number("rms_norm_eps", 1e-6), "rms_offset")
    sliding = dataclasses.replace(full, window=fields.integer("sliding_window", 4096))
    mlp = mlp_spec(fields, "hidden_activation")
    layers = {
        "full_attention": LayerSpec(full, mlp, norm, "both"),
        "sliding_attention": LayerSpec(sliding, mlp, norm, "both"),
    }
    return decoder_spec(
        fields,
        "gemma2",
        "Gemma2ForCausalLM",
        [layers[kind] for kind in fields.layer_types(tuple(layers), default=_alternating)],
        embed_scale=fields.integer("hidden_size") ** 0.5,
        logit_softcap=_softcap(fields, config, "final_logit_softcapping", 30.0),
    )


def _alternating(index: int) -> str:
    return "full_attention" if index % 2 else "sliding_attention"


def _softcap(fields: ConfigFields, config: dict[str, Any], field: str, default: float) -> float | None:
    """A soft cap; null means none, which is not the default."""
    if field in config and config[field] is None:
        fields.get(field)
        return None
    return fields.number(field, default)


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors: each is one leaf, or one layer of it."""
    return one_to_one(spec, MODULES | NORMS, OUTSIDE)
