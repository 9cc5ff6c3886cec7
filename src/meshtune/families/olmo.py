"""OLMo 1 and 1.7: Llama's layers with norms that have no parameters, queries, keys and values perhaps clipped
(https://arxiv.org/abs/2402.00838)."""

from __future__ import annotations

from meshtune.families.config_fields import ConfigFields, read_rope
from meshtune.families.family import Family
from meshtune.families.llama import attention_spec, decoder_spec, head_sizes, mlp_spec, tensors
from meshtune.model.layer import LayerSpec
from meshtune.model.norm import NormSpec
from meshtune.model.spec import ModelSpec

__all__ = ["model_spec", "tensors"]

EPS = 1e-5  # no field of the config

DESCRIPTIONS = {
    "olmo": Family(
        title="OLMo and OLMo 1.7",
        special="layer norms without parameters, clipped queries, keys and values (1.7)",
        models=("allenai/OLMo-7B-hf", "allenai/OLMo-1B-hf", "allenai/OLMo-1.7-7B-hf"),
    )
}


def model_spec(config: dict[str, object], where: str) -> ModelSpec:
    """OlmoConfig -> ModelSpec."""
    fields = ConfigFields(config, where)
    bias = bool(fields.get("attention_bias", False))
    attention = attention_spec(
        fields,
        rope=read_rope(fields, head_sizes(fields)[2], theta=10000.0),
        clip=None if fields.get("clip_qkv") is None else fields.number("clip_qkv"),
        qkv_bias=bias,
        out_bias=bias,
    )
    layer = LayerSpec(attention, mlp_spec(fields), NormSpec(EPS, "layer_plain"))
    return decoder_spec(fields, "olmo", "OlmoForCausalLM", [layer] * fields.integer("num_hidden_layers"))
