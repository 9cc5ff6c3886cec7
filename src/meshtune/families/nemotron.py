"""Nemotron 4 and Minitron: layer norms of one plus their weight, half of each head rotated, squared ReLU without a gate
(https://arxiv.org/abs/2402.16819, https://arxiv.org/abs/2407.14679)."""

from __future__ import annotations

from meshtune.families.config_fields import ConfigFields, read_rope
from meshtune.families.family import Family
from meshtune.families.llama import attention_spec, decoder_spec, head_sizes, mlp_spec, tensors
from meshtune.model.layer import LayerSpec
from meshtune.model.norm import NormSpec
from meshtune.model.spec import ModelSpec

__all__ = ["model_spec", "tensors"]

DESCRIPTIONS = {
    "nemotron": Family(
        title="Nemotron 4, Minitron",
        special="layer norms of one plus their weight, half of each head rotated, squared ReLU without a gate",
        models=("nvidia/Minitron-4B-Base", "nvidia/Minitron-8B-Base"),
    )
}


def model_spec(config: dict[str, object], where: str) -> ModelSpec:
    """NemotronConfig -> ModelSpec, with transformers' defaults for fields that are absent."""
    fields = ConfigFields(config, where)
    bias = bool(fields.get("attention_bias", False))
    fields.only("rope_percent", fields.number("partial_rotary_factor", 0.5))  # an older name of the same
    attention = attention_spec(
        fields,
        rope=read_rope(fields, head_sizes(fields)[2], theta=10_000.0, rotated=0.5),
        qkv_bias=bias,
        out_bias=bias,
    )
    mlp = mlp_spec(fields, default="relu2", gated=False, bias=bool(fields.get("mlp_bias", False)))
    layer = LayerSpec(attention, mlp, NormSpec(fields.number("norm_eps", 1e-5), "layer_offset"))
    return decoder_spec(fields, "nemotron", "NemotronForCausalLM", [layer] * fields.integer("num_hidden_layers"))
