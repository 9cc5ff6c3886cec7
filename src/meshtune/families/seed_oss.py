"""Seed-OSS: Llama's layout with biases on queries, keys and values, and a context of 512k tokens."""

from __future__ import annotations

from typing import Any

from meshtune.families.config_fields import ConfigFields
from meshtune.families.family import Family
from meshtune.families.llama import attention_spec, decoder_spec, mlp_spec, norm_spec, tensors
from meshtune.model.layer import LayerSpec
from meshtune.model.spec import ModelSpec

__all__ = ["model_spec", "tensors"]

# SeedOssConfig's, where they are not those of the other families.
DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True}

DESCRIPTIONS = {
    "seed_oss": Family(
        title="Seed-OSS",
        special="biases on queries, keys and values; dropout of its own, which is not applied",
        models=("ByteDance-Seed/Seed-OSS-36B-Instruct", "ByteDance-Seed/Seed-OSS-36B-Base"),
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """SeedOssConfig -> ModelSpec."""
    fields = ConfigFields(DEFAULTS | config, where)
    attention = attention_spec(
        fields,
        qkv_bias=bool(fields.get("attention_bias")),
        out_bias=bool(fields.get("attention_out_bias", False)),
    )
    mlp = mlp_spec(fields, bias=bool(fields.get("mlp_bias", False)))
    layers = [LayerSpec(attention, mlp, norm_spec(fields))] * fields.integer("num_hidden_layers")
    return decoder_spec(fields, "seed_oss", "SeedOssForCausalLM", layers)
