"""Qwen3: Llama's layout with normalised queries and keys (https://arxiv.org/abs/2505.09388)."""

from __future__ import annotations

from typing import Any

from meshtune.families.config_fields import ConfigFields
from meshtune.families.family import Family
from meshtune.families.llama import MODULES, OUTSIDE, decoder_spec, norm_spec
from meshtune.families.qwen2 import mrope_attention, windowed_layers
from meshtune.families.tensors import TensorMap, one_to_one
from meshtune.model.spec import ModelSpec

NORMS = {"attn/q_norm": "self_attn.q_norm", "attn/k_norm": "self_attn.k_norm"}

DESCRIPTIONS = {
    "qwen3": Family(
        title="Qwen3",
        special="queries and keys are normalised head by head",
        models=("Qwen/Qwen3-8B", "Qwen/Qwen3-32B"),
        template="chatml",
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """Qwen3Config -> ModelSpec. head_dim is 128 unless given, whatever hidden_size is."""
    config = {"head_dim": 128} | {key: value for key, value in config.items() if value is not None}
    fields = ConfigFields(config, where)
    bias = bool(fields.get("attention_bias", False))
    attention = mrope_attention(fields, "interleaved", qkv_bias=bias, out_bias=bias, qk_norm=norm_spec(fields))
    return decoder_spec(fields, "qwen3", "Qwen3ForCausalLM", windowed_layers(fields, attention))


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors: each is one leaf, or one layer of it."""
    return one_to_one(spec, MODULES | NORMS, OUTSIDE)
