"""Llama 2, 3, 3.1, 3.2, SmolLM2 and all that share their layout (https://arxiv.org/abs/2302.13971)."""

from __future__ import annotations

from typing import Any

from meshtune.families.config_fields import ConfigFields, read_rope
from meshtune.families.tensors import TensorMap, one_to_one
from meshtune.model.spec import LayerSpec, ModelSpec, stacks_of

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
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


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """LlamaConfig -> ModelSpec."""
    fields = ConfigFields(config, where)
    bias = bool(fields.get("attention_bias", False))
    layers = [LayerSpec()] * fields.integer("num_hidden_layers")
    spec = common_spec(
        fields, "llama", layers, qkv_bias=bias, out_bias=bias, mlp_bias=bool(fields.get("mlp_bias", False))
    )
    fields.finish("LlamaForCausalLM")
    return spec


def common_spec(fields: ConfigFields, family: str, layers: list[LayerSpec], **switches: Any) -> ModelSpec:
    """What all families with Llama's layout share. `switches` are ModelSpec fields."""
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
    activation = fields.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise fields.error(
            "hidden_act", f"hidden_act {activation!r} is not implemented", f"known: {', '.join(ACTIVATIONS)}"
        )
    return ModelSpec(
        family=family,
        vocab=fields.integer("vocab_size"),
        embed=embed,
        ffn=fields.integer("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=read_rope(fields, head_dim),
        stacks=stacks_of(layers),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=ACTIVATIONS[activation],  # pyright: ignore[reportArgumentType]  (values are the literals)
        tied=bool(fields.get("tie_word_embeddings", False)),
        init_std=fields.number("initializer_range", 0.02),
        **switches,
    )


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors: each is one leaf, or one layer of it."""
    return one_to_one(spec, MODULES, OUTSIDE)
