"""Llama 2, 3, 3.1, 3.2, SmolLM2 and all that share their layout (https://arxiv.org/abs/2302.13971)."""

from __future__ import annotations

from typing import Any

from meshtune.families.config_fields import ConfigFields, read_activation, read_rope
from meshtune.families.family import Family
from meshtune.families.tensors import TensorMap, one_to_one
from meshtune.model.attention import AttentionSpec
from meshtune.model.layer import LayerSpec
from meshtune.model.mlp import MlpSpec
from meshtune.model.norm import NormSpec
from meshtune.model.spec import ModelSpec, stacks_of

MODULES = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attn/q": "self_attn.q_proj",
    "attn/k": "self_attn.k_proj",
    "attn/v": "self_attn.v_proj",
    "attn/o": "self_attn.o_proj",
    "mlp/gate": "mlp.gate_proj",
    "mlp/up": "mlp.up_proj",
    "mlp/down": "mlp.down_proj",
}
OUTSIDE = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head", "score": "score"}

DESCRIPTIONS = {
    "llama": Family(
        title="Llama 2, 3, 3.1, 3.2, 3.3 and SmolLM2",
        special="the layout that the others are described by: pre-norms, rotary embedding, gated SiLU",
        models=("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.3-70B-Instruct", "HuggingFaceTB/SmolLM2-135M"),
        template="llama3",
        maturity="published weights",
    )
}


def model_spec(config: dict[str, object], where: str) -> ModelSpec:
    """LlamaConfig -> ModelSpec."""
    fields = ConfigFields(config, where)
    bias = bool(fields.get("attention_bias", False))
    attention = attention_spec(fields, qkv_bias=bias, out_bias=bias)
    mlp = mlp_spec(fields, bias=bool(fields.get("mlp_bias", False)))
    layer = LayerSpec(attention, mlp, norm_spec(fields))
    return decoder_spec(fields, "llama", "LlamaForCausalLM", [layer] * fields.integer("num_hidden_layers"))


def attention_spec(fields: ConfigFields, **switches: Any) -> AttentionSpec:
    """Attention from the usual fields, rotary unless `rope` says otherwise. `switches` are fields of AttentionSpec."""
    heads, kv_heads, head_dim = head_sizes(fields)
    switches = switches if "rope" in switches else switches | {"rope": read_rope(fields, head_dim)}
    return AttentionSpec(heads, kv_heads, head_dim, **switches)


def head_sizes(fields: ConfigFields) -> tuple[int, int, int]:
    """(query heads, key-value heads, numbers in a head) from the usual fields."""
    embed, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"{heads} heads do not divide into {kv_heads} key-value heads")
    if fields.get("head_dim") is None and embed % heads:
        raise fields.error(
            "hidden_size", f"hidden_size {embed} does not divide by {heads} heads, and head_dim is not given"
        )
    head_dim = fields.integer("head_dim", embed // heads)
    if head_dim % 2:
        raise fields.error("head_dim", f"head_dim {head_dim} is odd; rotary embedding needs pairs")
    return heads, kv_heads, head_dim


def mlp_spec(fields: ConfigFields, field: str = "hidden_act", default: str = "silu", **switches: Any) -> MlpSpec:
    """A gated feed-forward network; `field` names its activation. `switches` are fields of MlpSpec."""
    return MlpSpec(fields.integer("intermediate_size"), read_activation(fields, field, default), **switches)


def norm_spec(fields: ConfigFields) -> NormSpec:
    """Root mean square normalisation with rms_norm_eps."""
    return NormSpec(fields.number("rms_norm_eps", 1e-6))


def decoder_spec(
    fields: ConfigFields, family: str, architecture: str | tuple[str, ...], layers: list[LayerSpec], **switches: Any
) -> ModelSpec:
    """The model around its layers, from the usual fields, after which every field of the config must have been read.

    `architecture` is the class of its causal language model in transformers, followed by names that the same model has
    elsewhere; `switches` are fields of ModelSpec.
    """
    usual = {
        "vocab": fields.integer("vocab_size"),
        "embed": fields.integer("hidden_size"),
        "norm": layers[0].norm,
        "max_length": fields.integer("max_position_embeddings"),
        "tied": bool(fields.get("tie_word_embeddings", False)),
        "init_std": fields.number("initializer_range", 0.02),
        "mtp_layers": int(fields.get("num_nextn_predict_layers", 0)),
    }
    fields.finish(*((architecture,) if isinstance(architecture, str) else architecture))
    return ModelSpec(family=family, stacks=stacks_of(layers), notes=tuple(fields.notes), **(usual | switches))


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors: each is one leaf, or one layer of it."""
    return one_to_one(spec, MODULES, OUTSIDE)
