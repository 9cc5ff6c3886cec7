"""Qwen2 and Qwen2.5: Llama's layout with biases on q, k and v (https://arxiv.org/abs/2407.10671)."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshtune.families.config_fields import ConfigFields, read_rope
from meshtune.families.family import Family
from meshtune.families.llama import attention_spec, decoder_spec, head_sizes, mlp_spec, norm_spec, tensors
from meshtune.model.attention import AttentionSpec
from meshtune.model.layer import LayerSpec
from meshtune.model.rope import RopeAxes
from meshtune.model.spec import ModelSpec

__all__ = ["model_spec", "tensors", "windowed_layers"]

DESCRIPTIONS = {
    "qwen2": Family(
        title="Qwen2 and Qwen2.5",
        special="biases on queries, keys and values; sliding windows in the upper layers of some sizes",
        models=("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-Coder-32B-Instruct"),
        template="chatml",
    )
}


def model_spec(config: dict[str, object], where: str) -> ModelSpec:
    """Qwen2Config -> ModelSpec."""
    fields = ConfigFields(config, where)
    layers = windowed_layers(fields, mrope_attention(fields, "blocks", qkv_bias=True))
    return decoder_spec(fields, "qwen2", "Qwen2ForCausalLM", layers)


def mrope_attention(fields: ConfigFields, mrope: RopeAxes, **switches: Any) -> AttentionSpec:
    """`attention_spec`, with M-RoPE where the config has its sections: in text models that see."""
    return attention_spec(fields, rope=read_rope(fields, head_sizes(fields)[2], mrope=mrope), **switches)


def windowed_layers(fields: ConfigFields, attention: AttentionSpec) -> list[LayerSpec]:
    """Layers from max_window_layers on slide, where use_sliding_window says so; layer_types says it layer by layer."""
    full = LayerSpec(attention, mlp_spec(fields), norm_spec(fields))
    first, window = fields.get("max_window_layers", 28), fields.get("sliding_window", 4096)
    if not fields.get("use_sliding_window", False):
        window = None
    if window is None and "sliding_attention" in fields.get("layer_types", ()):
        raise fields.error(
            "layer_types",
            "layer_types has layers with sliding_attention, and there is no window: use_sliding_window is not true, or "
            "sliding_window is null",
            "set use_sliding_window and sliding_window, or make every layer full_attention, as the model was trained",
        )
    layers = {
        "full_attention": full,
        "sliding_attention": dataclasses.replace(full, mixer=dataclasses.replace(attention, window=window)),
    }
    kinds = fields.layer_types(
        tuple(layers), default=lambda index: "sliding_attention" if index >= first else "full_attention"
    )
    return [layers[kind] for kind in kinds]
