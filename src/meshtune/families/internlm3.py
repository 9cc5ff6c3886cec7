"""InternLM 3: Llama's layout under the names that InternLM gave its biases."""

from __future__ import annotations

from typing import Any

from meshtune.families.config_fields import ConfigFields
from meshtune.families.family import Family
from meshtune.families.llama import attention_spec, decoder_spec, mlp_spec, tensors
from meshtune.model.layer import LayerSpec
from meshtune.model.norm import NormSpec
from meshtune.model.spec import ModelSpec

__all__ = ["model_spec", "tensors"]

# InternLM3Config's, where they are not those of the other families.
DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128}

DESCRIPTIONS = {
    "internlm3": Family(
        title="InternLM 3",
        special="none: Llama's layout, with a dynamic rotary embedding",
        models=("internlm/internlm3-8b-instruct",),
        template="chatml",
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """InternLM3Config -> ModelSpec. `qkv_bias` is that of queries, keys and values, `bias` that of all else.

    transformers, which writes them as attention_bias and mlp_bias, knows only equal ones.
    """
    fields = ConfigFields(DEFAULTS | config, where)
    fields.harmless("auto_map")
    qkv_bias, bias = _either(fields, "qkv_bias", "attention_bias"), _either(fields, "bias", "mlp_bias")
    attention = attention_spec(fields, qkv_bias=qkv_bias, out_bias=bias)
    layer = LayerSpec(attention, mlp_spec(fields, bias=bias), NormSpec(fields.number("rms_norm_eps", 1e-5)))
    layers = [layer] * fields.integer("num_hidden_layers")
    return decoder_spec(fields, "internlm3", ("LlamaForCausalLM", "InternLM3ForCausalLM"), layers)


def _either(fields: ConfigFields, *names: str) -> bool:
    """A switch under either of two names, which must agree."""
    values = {bool(value) for name in names if (value := fields.get(name)) is not None}
    if len(values) > 1:
        raise fields.error(names[0], f"{names[0]} and {names[1]} disagree")
    return values.pop() if values else False
