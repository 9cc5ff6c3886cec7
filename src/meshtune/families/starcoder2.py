"""StarCoder 2: layer norms and biases throughout, a feed-forward network without a gate
(https://arxiv.org/abs/2402.19173)."""

from __future__ import annotations

from typing import Any

from meshtune.families.config_fields import ConfigFields, read_rope
from meshtune.families.family import Family
from meshtune.families.llama import MODULES, OUTSIDE, attention_spec, decoder_spec, head_sizes, mlp_spec
from meshtune.families.tensors import TensorMap, one_to_one
from meshtune.model.layer import LayerSpec
from meshtune.model.norm import NormSpec
from meshtune.model.spec import ModelSpec

MLP = {"mlp/up": "mlp.c_fc", "mlp/down": "mlp.c_proj"}
# How the models were trained elsewhere; fields that transformers does not read, with the values that it implements.
ELSEWHERE = {"mlp_type": "default", "norm_type": "layer_norm", "scale_attn_weights": True}
HARMLESS = (
    "activation_function",
    "attention_softmax_in_fp32",
    "layer_norm_epsilon",
    "scale_attention_softmax_in_fp32",
)

DESCRIPTIONS = {
    "starcoder2": Family(
        title="StarCoder 2",
        special="layer norms, biases, a window in every layer, an MLP without a gate",
        models=("bigcode/starcoder2-3b", "bigcode/starcoder2-15b"),
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """Starcoder2Config -> ModelSpec, with transformers' defaults for fields that are absent."""
    fields = ConfigFields({"tie_word_embeddings": True, "num_key_value_heads": 2} | config, where)
    for field, value in ELSEWHERE.items():
        fields.only(field, value)
    fields.harmless(*HARMLESS)
    bias = bool(fields.get("use_bias", True))
    attention = attention_spec(
        fields,
        rope=read_rope(fields, head_sizes(fields)[2], theta=10_000.0),
        window=fields.get("sliding_window"),
        qkv_bias=bias,
        out_bias=bias,
    )
    mlp = mlp_spec(fields, default="gelu_pytorch_tanh", gated=False, bias=bias)
    layer = LayerSpec(attention, mlp, NormSpec(fields.number("norm_epsilon", 1e-5), "layer"))
    return decoder_spec(fields, "starcoder2", "Starcoder2ForCausalLM", [layer] * fields.integer("num_hidden_layers"))


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors: each is one leaf, or one layer of it."""
    return one_to_one(spec, MODULES | MLP, OUTSIDE)
