"""Gemma 3's text model, alone or in a vision-language model: Gemma 2 with normalised queries and keys in place of soft
caps, and another rotary embedding in sliding-window layers (https://arxiv.org/abs/2503.19786)."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshtune.families import gemma2, qwen3
from meshtune.families.config_fields import ConfigFields, read_ropes
from meshtune.families.family import OVERFLOWS_IN_VLLM, Family
from meshtune.families.llama import MODULES, OUTSIDE, attention_spec, decoder_spec, mlp_spec
from meshtune.families.tensors import TensorMap, one_to_one
from meshtune.model.layer import LayerSpec
from meshtune.model.norm import NormSpec
from meshtune.model.spec import ModelSpec

# Gemma3TextConfig's; the configs of the published vision-language models leave out what equals them.
DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": gemma2.TANH,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
# The base frequency of each layer type: its field before transformers 5, and its default.
THETAS = {"full_attention": ("rope_theta", 1_000_000.0), "sliding_attention": ("rope_local_base_freq", 10_000.0)}

DESCRIPTIONS = {
    "gemma3_text": Family(
        title="Gemma 3",
        special="norms before and after each block, normalised queries and keys, two rotary embeddings, windows in "
        "five of six layers",
        models=("google/gemma-3-270m-it", "google/gemma-3-1b-it"),
        overflow=OVERFLOWS_IN_VLLM,
        template="gemma",
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """Gemma3TextConfig -> ModelSpec, with transformers' defaults for fields that are absent."""
    fields = ConfigFields(DEFAULTS | config, where)
    fields.only("use_bidirectional_attention", None, False)
    for unused in ("cache_implementation", "attn_logit_softcapping"):  # the attention takes no soft cap
        fields.get(unused)
    bias = bool(fields.get("attention_bias", False))
    norm = NormSpec(fields.number("rms_norm_eps", 1e-6), "rms_offset")
    ropes = read_ropes(fields, fields.integer("head_dim"), THETAS, scaled=("full_attention",))
    full = attention_spec(
        fields,
        rope=ropes["full_attention"],
        scale=fields.number("query_pre_attn_scalar") ** -0.5,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=norm,
    )
    window = fields.integer("sliding_window")
    sliding = dataclasses.replace(full, rope=ropes["sliding_attention"], window=window)
    mlp = mlp_spec(fields, "hidden_activation")
    layers = {
        "full_attention": LayerSpec(full, mlp, norm, "both"),
        "sliding_attention": LayerSpec(sliding, mlp, norm, "both"),
    }
    pattern = fields.integer("sliding_window_pattern", 6)

    def default(index: int) -> str:
        return "sliding_attention" if (index + 1) % pattern else "full_attention"

    return decoder_spec(
        fields,
        "gemma3_text",
        "Gemma3ForCausalLM",
        [layers[kind] for kind in fields.layer_types(tuple(layers), default)],
        embed_scale=fields.integer("hidden_size") ** 0.5,
        logit_softcap=None
        if fields.get("final_logit_softcapping") is None
        else fields.number("final_logit_softcapping"),
    )


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors: each is one leaf, or one layer of it."""
    return one_to_one(spec, MODULES | gemma2.NORMS | qwen3.NORMS, OUTSIDE)
