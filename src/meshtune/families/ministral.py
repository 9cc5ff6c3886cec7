"""Ministral 8B (`ministral`): Mistral's layout with windows by layer type; Ministral 3 and Devstral 2 (`ministral3`,
alone or in a vision-language model): with queries that grow with their position beyond the original context."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshtune.families.config_fields import ConfigFields, read_rope
from meshtune.families.family import Family
from meshtune.families.llama import attention_spec, decoder_spec, head_sizes, mlp_spec, norm_spec, tensors
from meshtune.model.attention import LongQuerySpec
from meshtune.model.layer import LayerSpec
from meshtune.model.spec import ModelSpec

__all__ = ["model_spec", "tensors"]

# MinistralConfig's and Ministral3Config's, where they are not those of the other families.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "ministral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "ministral3": {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
}
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}  # Ministral3Config's where rope_parameters is null
BETA = "llama_4_scaling_beta"

DESCRIPTIONS = {
    "ministral": Family(
        title="Ministral 8B",
        special="sliding windows by layer type",
        models=("mistralai/Ministral-8B-Instruct-2410",),
        template="mistral",
    ),
    "ministral3": Family(
        title="Ministral 3 and Devstral 2 (text)",
        special="YaRN, and queries that grow with their position beyond the original context",
        models=("mistralai/Devstral-2-123B-Instruct-2512",),
    ),
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """MinistralConfig or Ministral3Config -> ModelSpec."""
    kind = config["model_type"]
    config = {**DEFAULTS[kind], **config}
    return _ministral(config, where) if kind == "ministral" else _ministral3(config, where)


def _ministral(config: dict[str, Any], where: str) -> ModelSpec:
    fields = ConfigFields(config, where)
    full, window = attention_spec(fields), fields.get("sliding_window")
    kinds = fields.layer_types(
        ("full_attention", "sliding_attention"),
        default=lambda _: "full_attention" if window is None else "sliding_attention",
    )
    if window is None and "sliding_attention" in kinds:
        raise fields.error("sliding_window", "sliding_window is null, and layer_types has layers with one")
    mlp, norm = mlp_spec(fields), norm_spec(fields)
    layers = {
        "full_attention": LayerSpec(full, mlp, norm),
        "sliding_attention": LayerSpec(dataclasses.replace(full, window=window), mlp, norm),
    }
    return decoder_spec(fields, "ministral", "MinistralForCausalLM", [layers[kind] for kind in kinds])


def _ministral3(config: dict[str, Any], where: str) -> ModelSpec:
    """Layers are alike: layer_types, which transformers does not read here, must not say otherwise."""
    blocks = {name: config[name] for name in ("rope_parameters", "rope_scaling") if isinstance(config.get(name), dict)}
    blocks = blocks or {"rope_parameters": ROPE}
    betas = {block.get(BETA) or 0.0 for block in blocks.values()}
    extra = (BETA, "max_position_embeddings")
    config = config | {
        name: {key: value for key, value in block.items() if key not in extra} for name, block in blocks.items()
    }
    fields = ConfigFields(config, where)
    rope, window = read_rope(fields, head_sizes(fields)[2]), fields.get("sliding_window")
    if len(betas) > 1:
        raise fields.error("rope_scaling", f"{BETA} differs between rope_parameters and rope_scaling")
    beta = float(betas.pop())
    long_query = LongQuerySpec(beta, rope.original_length) if beta else None
    attention = attention_spec(fields, rope=rope, window=window, long_query=long_query)
    layer = LayerSpec(attention, mlp_spec(fields), norm_spec(fields))
    layers = [layer] * fields.integer("num_hidden_layers")
    kind = "full_attention" if window is None else "sliding_attention"
    fields.only("layer_types", [kind] * len(layers))
    return decoder_spec(fields, "ministral3", "Ministral3ForCausalLM", layers)
