"""Qwen3: Llama's layout with normalised queries and keys (https://arxiv.org/abs/2505.09388)."""

from __future__ import annotations

from typing import Any

from meshtune.families.config_fields import ConfigFields
from meshtune.families.llama import common_spec, hf_names, module_names
from meshtune.families.qwen2 import windowed_layers
from meshtune.model.spec import ModelSpec

__all__ = ["hf_names", "model_spec", "module_names"]


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """Qwen3Config -> ModelSpec. head_dim is 128 unless given, whatever hidden_size is."""
    config = {"head_dim": 128} | {key: value for key, value in config.items() if value is not None}
    fields = ConfigFields(config, where)
    bias = bool(fields.get("attention_bias", False))
    spec = common_spec(fields, "qwen3", windowed_layers(fields), qkv_bias=bias, out_bias=bias, qk_norm=True)
    fields.finish("Qwen3ForCausalLM")
    return spec
