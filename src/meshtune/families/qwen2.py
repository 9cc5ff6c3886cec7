"""Qwen2 and Qwen2.5: Llama's layout with biases on q, k and v (https://arxiv.org/abs/2407.10671)."""

from __future__ import annotations

from typing import Any

from meshtune.families.config_fields import ConfigFields
from meshtune.families.llama import common_spec, tensors
from meshtune.model.spec import LayerSpec, ModelSpec

__all__ = ["model_spec", "tensors", "windowed_layers"]


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """Qwen2Config -> ModelSpec."""
    fields = ConfigFields(config, where)
    spec = common_spec(fields, "qwen2", windowed_layers(fields), qkv_bias=True)
    fields.finish("Qwen2ForCausalLM")
    return spec


def windowed_layers(fields: ConfigFields) -> list[LayerSpec]:
    """Layers from max_window_layers on slide, where use_sliding_window says so; layer_types says it layer by layer."""
    count = fields.integer("num_hidden_layers")
    first, kinds = fields.get("max_window_layers", 28), fields.get("layer_types")
    window = fields.get("sliding_window", 4096) if fields.get("use_sliding_window", False) else None
    if kinds is None:
        return [LayerSpec(window if i >= first else None) for i in range(count)]
    known = {"full_attention", "sliding_attention"}
    if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= known:
        raise fields.error(
            "layer_types", f"layer_types must list one of {sorted(known)} for each of the {count} layers"
        )
    return [LayerSpec(window if kind == "sliding_attention" else None) for kind in kinds]
