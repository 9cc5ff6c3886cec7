"""Command R and R+, Aya: attention and the feed-forward network in parallel after one layer norm, rotary
embedding of neighbouring pairs, scaled logits (https://arxiv.org/abs/2405.15032)."""

from __future__ import annotations

from typing import Any

from meshtune.families import qwen3
from meshtune.families.config_fields import ConfigFields, read_rope
from meshtune.families.family import Family
from meshtune.families.llama import MODULES, OUTSIDE, attention_spec, decoder_spec, head_sizes, mlp_spec
from meshtune.families.tensors import TensorMap, one_to_one
from meshtune.model.layer import LayerSpec
from meshtune.model.norm import NormSpec
from meshtune.model.spec import ModelSpec

# How the models were trained elsewhere; fields that transformers does not read, with the values that it implements.
ELSEWHERE = {
    "position_embedding_type": "rope_gptj",
    "use_gated_activation": True,
    "use_parallel_block": True,
    "rotary_pct": 1.0,
    "rope_scaling_factor": 1.0,
}
HARMLESS = ("auto_map", "use_embedding_sharding", "use_parallel_embedding", "cache_implementation")

DESCRIPTIONS = {
    "cohere": Family(
        title="Command R, Command R+, Aya 23, Aya Expanse",
        special="attention and MLP in parallel after one layer norm, interleaved rotary embedding, scaled logits; "
        "queries and keys normalised with weights for each head (R+)",
        models=("CohereForAI/c4ai-command-r-v01", "CohereForAI/aya-expanse-8b"),
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """CohereConfig -> ModelSpec, with transformers' defaults for fields that are absent."""
    fields = cohere_fields(config, where)
    bias, norm = bool(fields.get("attention_bias", False)), norm_spec(fields)
    attention = attention_spec(
        fields,
        rope=read_rope(fields, head_sizes(fields)[2], theta=500_000.0, interleaved=True),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=norm if fields.get("use_qk_norm", False) else None,
        qk_norm_over="own_head",
    )
    layer = LayerSpec(attention, mlp_spec(fields), norm, "parallel_shared")
    layers = [layer] * fields.integer("num_hidden_layers")
    return decoder_spec(fields, "cohere", "CohereForCausalLM", layers, logit_scale=fields.number("logit_scale", 0.0625))


def cohere_fields(config: dict[str, Any], where: str) -> ConfigFields:
    """The fields of Command R and its successors, those read that transformers does not read."""
    fields = ConfigFields({"tie_word_embeddings": True} | config, where)
    for field, value in ELSEWHERE.items():
        fields.only(field, value)
    fields.harmless(*HARMLESS)
    return fields


def norm_spec(fields: ConfigFields) -> NormSpec:
    """Layer norm without a bias."""
    return NormSpec(fields.number("layer_norm_eps", 1e-5), "layer_scale")


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors: each is one leaf, or one layer of it."""
    return one_to_one(spec, MODULES | qwen3.NORMS, OUTSIDE)
