"""Granite 3 (dense): Llama's layers with a multiplier each on embeddings, scores, residual sums and logits
(https://arxiv.org/abs/2410.18959, after https://arxiv.org/abs/2408.13359)."""

from __future__ import annotations

from meshtune.families.config_fields import ConfigFields, read_rope
from meshtune.families.family import Family
from meshtune.families.llama import attention_spec, decoder_spec, head_sizes, mlp_spec, norm_spec, tensors
from meshtune.model.layer import LayerSpec
from meshtune.model.spec import ModelSpec

__all__ = ["model_spec", "tensors"]

DESCRIPTIONS = {
    "granite": Family(
        title="Granite 3",
        special="multipliers on embeddings, scores, residual sums and logits",
        models=("ibm-granite/granite-3.3-8b-instruct", "ibm-granite/granite-3.3-2b-instruct"),
    )
}


def model_spec(config: dict[str, object], where: str) -> ModelSpec:
    """GraniteConfig -> ModelSpec. A multiplier that is absent is 1, that of scores as well."""
    fields = ConfigFields(config, where)
    bias = bool(fields.get("attention_bias", False))
    attention = attention_spec(
        fields,
        rope=read_rope(fields, head_sizes(fields)[2], theta=10000.0),
        scale=fields.number("attention_multiplier", 1.0),
        qkv_bias=bias,
        out_bias=bias,
    )
    mlp = mlp_spec(fields, bias=bool(fields.get("mlp_bias", False)))
    layer = LayerSpec(attention, mlp, norm_spec(fields), scale=fields.number("residual_multiplier", 1.0))
    return decoder_spec(
        fields,
        "granite",
        "GraniteForCausalLM",
        [layer] * fields.integer("num_hidden_layers"),
        embed_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=1 / fields.number("logits_scaling", 1.0),
    )
