"""SmolLM3: Llama's layout with layers that have no rotary embedding (https://arxiv.org/abs/2501.18795)."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshtune.families.config_fields import ConfigFields, read_rope
from meshtune.families.family import Family
from meshtune.families.llama import attention_spec, decoder_spec, head_sizes, mlp_spec, norm_spec, tensors
from meshtune.model.layer import LayerSpec
from meshtune.model.spec import ModelSpec

__all__ = ["model_spec", "tensors"]

# SmolLM3Config's, where they are not those of the other families.
DEFAULTS = {"num_key_value_heads": 4, "tie_word_embeddings": True}

DESCRIPTIONS = {
    "smollm3": Family(
        title="SmolLM3",
        special="no rotary embedding in every fourth layer",
        models=("HuggingFaceTB/SmolLM3-3B", "HuggingFaceTB/SmolLM3-3B-Base"),
        template="chatml",
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """SmolLM3Config -> ModelSpec. `no_rope_layers` has a 1 for every layer WITH a rotary embedding."""
    fields = ConfigFields(DEFAULTS | config, where)
    fields.harmless("max_window_layers")
    rotated, kinds = _rotary_layers(fields), _kinds(fields)
    bias = bool(fields.get("attention_bias", False))
    rope = read_rope(fields, head_sizes(fields)[2], theta=2_000_000.0)
    attention = attention_spec(fields, rope=rope, qkv_bias=bias, out_bias=bias)
    mlp, norm = mlp_spec(fields, bias=bool(fields.get("mlp_bias", False))), norm_spec(fields)
    window = fields.get("sliding_window")
    layers = [
        LayerSpec(
            dataclasses.replace(
                attention, rope=rope if is_rotated else None, window=window if kind == "sliding_attention" else None
            ),
            mlp,
            norm,
        )
        for is_rotated, kind in zip(rotated, kinds, strict=True)
    ]
    return decoder_spec(fields, "smollm3", "SmolLM3ForCausalLM", layers)


def _rotary_layers(fields: ConfigFields) -> list[bool]:
    """Whether each layer has a rotary embedding."""
    count, interval = fields.integer("num_hidden_layers"), fields.integer("no_rope_layer_interval", 4)
    flags = fields.get("no_rope_layers")
    if flags is None:
        return [(index + 1) % interval != 0 for index in range(count)]
    if not isinstance(flags, list) or len(flags) < count or not set(flags) <= {0, 1}:
        raise fields.error("no_rope_layers", f"no_rope_layers must list 0 or 1 for each of the {count} layers")
    return [bool(flag) for flag in flags[:count]]


def _kinds(fields: ConfigFields) -> list[str]:
    """The layer types: with a window in layers without a rotary embedding, where use_sliding_window says so."""
    windows = bool(fields.get("use_sliding_window", False)) and fields.get("sliding_window") is not None
    rotated = _rotary_layers(fields)

    def default(index: int) -> str:
        return "sliding_attention" if windows and not rotated[index] else "full_attention"

    kinds = fields.layer_types(("full_attention", "sliding_attention"), default)
    if "sliding_attention" in kinds and not windows:
        raise fields.error(
            "layer_types",
            "layer_types has layers with sliding_attention, and there is no window: use_sliding_window is not true, or "
            "sliding_window is null",
            "set use_sliding_window and sliding_window, or make every layer full_attention, as the model was trained",
        )
    return kinds
