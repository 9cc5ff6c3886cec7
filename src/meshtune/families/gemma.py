"""Gemma 1: Llama's layout with norms of one plus their weight and scaled embeddings (https://arxiv.org/abs/2403.08295)."""

from __future__ import annotations

from typing import Any

from meshtune.families.config_fields import ConfigFields
from meshtune.families.family import Family
from meshtune.families.llama import attention_spec, decoder_spec, mlp_spec, tensors
from meshtune.model.layer import LayerSpec
from meshtune.model.norm import NormSpec
from meshtune.model.spec import ModelSpec

__all__ = ["model_spec", "tensors"]

TANH = "gelu_pytorch_tanh"

DESCRIPTIONS = {
    "gemma": Family(
        title="Gemma 1",
        special="norms of one plus their weight, scaled embeddings, heads wider than the hidden state divided by them",
        models=("google/gemma-2b-it", "google/gemma-7b-it", "google/codegemma-7b-it"),
        template="gemma",
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """GemmaConfig -> ModelSpec, with transformers' defaults for fields that are absent.

    hidden_act "gelu" of the released configs means the tanh approximation, as in transformers.
    """
    config = {"head_dim": 256, "tie_word_embeddings": True, "hidden_act": TANH} | config
    if config["hidden_act"] in ("gelu", None):
        config["hidden_act"] = TANH
    fields = ConfigFields(config, where)
    fields.only("hidden_activation", None, config["hidden_act"])  # a second name, which transformers 5 does not read
    fields.only("use_bidirectional_attention", None, False)
    bias = bool(fields.get("attention_bias", False))
    norm = NormSpec(fields.number("rms_norm_eps", 1e-6), "rms_offset")
    layer = LayerSpec(attention_spec(fields, qkv_bias=bias, out_bias=bias), mlp_spec(fields), norm)
    layers = [layer] * fields.integer("num_hidden_layers")
    scale = fields.integer("hidden_size") ** 0.5
    return decoder_spec(fields, "gemma", "GemmaForCausalLM", layers, embed_scale=scale)
