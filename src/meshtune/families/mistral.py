"""Mistral 7B and its successors: Llama's layout with a sliding window (https://arxiv.org/abs/2310.06825)."""

from __future__ import annotations

from typing import Any

from meshtune.families.config_fields import ConfigFields
from meshtune.families.family import Family
from meshtune.families.llama import attention_spec, decoder_spec, mlp_spec, norm_spec, tensors
from meshtune.model.layer import LayerSpec
from meshtune.model.spec import ModelSpec

__all__ = ["model_spec", "tensors"]

DESCRIPTIONS = {
    "mistral": Family(
        title="Mistral 7B and Mistral Nemo",
        special="a sliding window in every layer of the first version",
        models=("mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mistral-Nemo-Instruct-2407"),
        template="mistral",
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """MistralConfig -> ModelSpec. A config that does not mention sliding_window has Mistral 7B v0.1's 4096."""
    fields = ConfigFields(config, where)
    window = fields.get("sliding_window")
    if "sliding_window" not in config:
        window = 4096
    layer = LayerSpec(attention_spec(fields, window=window), mlp_spec(fields), norm_spec(fields))
    return decoder_spec(fields, "mistral", "MistralForCausalLM", [layer] * fields.integer("num_hidden_layers"))
