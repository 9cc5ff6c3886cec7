"""Arcee's AFM: Llama's layout with a plain feed-forward network of squared ReLU."""

from __future__ import annotations

from meshtune.families.config_fields import ConfigFields
from meshtune.families.family import Family
from meshtune.families.llama import attention_spec, decoder_spec, mlp_spec, tensors
from meshtune.model.layer import LayerSpec
from meshtune.model.norm import NormSpec
from meshtune.model.spec import ModelSpec

__all__ = ["model_spec", "tensors"]

DESCRIPTIONS = {
    "arcee": Family(
        title="Arcee AFM",
        special="a feed-forward network without a gate, of squared ReLU",
        models=("arcee-ai/AFM-4.5B", "arcee-ai/AFM-4.5B-Base"),
    )
}


def model_spec(config: dict[str, object], where: str) -> ModelSpec:
    """ArceeConfig -> ModelSpec."""
    fields = ConfigFields(config, where)
    bias = bool(fields.get("attention_bias", False))
    attention = attention_spec(fields, qkv_bias=bias, out_bias=bias)
    mlp = mlp_spec(fields, default="relu2", gated=False, bias=bool(fields.get("mlp_bias", False)))
    layer = LayerSpec(attention, mlp, NormSpec(fields.number("rms_norm_eps", 1e-5)))
    return decoder_spec(fields, "arcee", "ArceeForCausalLM", [layer] * fields.integer("num_hidden_layers"))
