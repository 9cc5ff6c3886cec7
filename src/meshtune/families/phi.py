"""Phi 1, 1.5 and 2: one layer norm for attention and the feed-forward network, which both read and add to the same
stream, biases everywhere, partial rotation (https://arxiv.org/abs/2309.05463)."""

from __future__ import annotations

from meshtune.families.config_fields import ConfigFields, read_rope
from meshtune.families.family import Family
from meshtune.families.llama import MODULES, OUTSIDE, attention_spec, decoder_spec, head_sizes, mlp_spec
from meshtune.families.tensors import TensorMap, one_to_one
from meshtune.model.layer import LayerSpec
from meshtune.model.norm import NormSpec
from meshtune.model.spec import ModelSpec

PHI = {
    "attn/o": "self_attn.dense",
    "attn/q_norm": "self_attn.q_layernorm",
    "attn/k_norm": "self_attn.k_layernorm",
    "mlp/up": "mlp.fc1",
    "mlp/down": "mlp.fc2",
}

DESCRIPTIONS = {
    "phi": Family(
        title="Phi 1, 1.5 and 2",
        special="parallel attention and feed-forward behind one layer norm, biases everywhere, partial rotation",
        models=("microsoft/phi-2", "microsoft/phi-1_5"),
    )
}


def model_spec(config: dict[str, object], where: str) -> ModelSpec:
    """PhiConfig -> ModelSpec."""
    fields = ConfigFields(config, where)
    fields.harmless("auto_map")
    fields.only("tie_word_embeddings", False)  # the head has a bias, which a tied one has not here
    norm = NormSpec(fields.number("layer_norm_eps", 1e-5), "layer")
    attention = attention_spec(
        fields,
        rope=read_rope(fields, head_sizes(fields)[2], theta=10000.0, rotated=0.5),
        qkv_bias=True,
        out_bias=True,
        qk_norm=norm if fields.get("qk_layernorm", False) else None,
    )
    mlp = mlp_spec(fields, default="gelu_new", gated=False, bias=True)
    layer = LayerSpec(attention, mlp, norm, "parallel_shared")
    layers = [layer] * fields.integer("num_hidden_layers")
    return decoder_spec(fields, "phi", "PhiForCausalLM", layers, head_bias=True)


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors: each is one leaf, or one layer of it."""
    return one_to_one(spec, MODULES | PHI, OUTSIDE | {"norm": "model.final_layernorm"})
