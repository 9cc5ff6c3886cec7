"""Falcon 1 and 2: fused queries, keys and values, attention in parallel to the feed-forward network
(https://arxiv.org/abs/2311.16867).

Three architectures share the model type: 7B has one key-value head and one norm a layer; 40B, 180B and 11B have groups
of heads, and a norm for each block or one; the RW models have ALiBi and blocks in sequence. transformers rounds ALiBi's
biases to bfloat16; here their slopes are rounded, and the biases computed from them are not.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from meshtune.families.baichuan import alibi_slopes
from meshtune.families.config_fields import ConfigFields, read_rope
from meshtune.families.family import FUSED_ROWS, Family
from meshtune.families.llama import attention_spec, decoder_spec, head_sizes, mlp_spec
from meshtune.families.tensors import TensorMap, one_to_one
from meshtune.model.attention import AlibiSpec
from meshtune.model.layer import LayerSpec, Placement
from meshtune.model.norm import NormSpec
from meshtune.model.spec import ModelSpec

LAYERS = "transformer.h"
MODULES = {
    "attn/qkv": "self_attention.query_key_value",
    "attn/o": "self_attention.dense",
    "mlp/up": "mlp.dense_h_to_4h",
    "mlp/down": "mlp.dense_4h_to_h",
}
NORMS: dict[Placement, dict[str, str]] = {
    "pre": {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "parallel": {"attn_norm": "ln_attn", "mlp_norm": "ln_mlp"},
    "parallel_shared": {"attn_norm": "input_layernorm"},
}
OUTSIDE = {
    "embed": "transformer.word_embeddings",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "score": "score",
}
# Of training elsewhere, or derived from other fields.
HARMLESS = ("auto_map", "ff_factor", "rotary", "attn_implementation")

DESCRIPTIONS = {
    "falcon": Family(
        title="Falcon 7B, 40B, 180B, RW, Falcon 2",
        special="fused queries, keys and values, attention and MLP in parallel; RW: biases by distance (ALiBi), which "
        "transformers rounds to bfloat16 and Meshtune does not",
        models=("tiiuae/falcon-7b", "tiiuae/falcon-11B", "tiiuae/falcon-rw-1b"),
        limits=FUSED_ROWS,
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """FalconConfig -> ModelSpec, with transformers' defaults for fields that are absent."""
    fields = ConfigFields(_rename_fields(config), where)
    fields.harmless(*HARMLESS)
    fields.only("apply_residual_connection_post_layernorm", False)
    placement = _placement(fields)
    heads, _, head_dim = head_sizes(fields)
    fields.only("head_dim", fields.integer("hidden_size") // heads)
    rope, alibi = None, None
    if fields.get("alibi", False):
        slopes = [float(jnp.bfloat16(slope)) * head_dim**-0.5 for slope in alibi_slopes(heads)]
        alibi = AlibiSpec(tuple(slopes))
        for field in ("rope_theta", "rope_scaling", "rope_parameters"):
            fields.get(field)
    else:
        rope = read_rope(fields, head_dim, theta=10_000.0)
    bias = bool(fields.get("bias", False))
    attention = attention_spec(fields, rope=rope, alibi=alibi, qkv_bias=bias, out_bias=bias, packed=True)
    mlp = mlp_spec(fields, "activation", "gelu", gated=False, bias=bias)
    norm = NormSpec(fields.number("layer_norm_epsilon", 1e-5), "layer")
    layer = LayerSpec(attention, mlp, norm, placement)
    return decoder_spec(fields, "falcon", "FalconForCausalLM", [layer] * fields.integer("num_hidden_layers"))


def _rename_fields(config: dict[str, Any]) -> dict[str, Any]:
    """The config with the names of the usual fields, and the key-value heads that its architecture has."""
    config = {"tie_word_embeddings": True, "max_position_embeddings": 2048} | config
    renamed = {key: value for key, value in config.items() if key not in ("num_kv_heads", "ffn_hidden_size")}
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    if config.get("new_decoder_architecture"):
        renamed["num_key_value_heads"] = config.get("num_kv_heads") or heads
    else:
        renamed["num_key_value_heads"] = 1 if config.get("multi_query", True) else heads
    renamed["intermediate_size"] = config.get("ffn_hidden_size") or (4 * width if isinstance(width, int) else None)
    return renamed


def _placement(fields: ConfigFields) -> Placement:
    parallel, norms = bool(fields.get("parallel_attn", True)), fields.get("num_ln_in_parallel_attn")
    new = bool(fields.get("new_decoder_architecture", False))
    fields.get("multi_query")
    if norms not in (None, 1, 2) or (norms == 2 and not new):
        raise fields.error(
            "num_ln_in_parallel_attn", f"num_ln_in_parallel_attn = {norms!r} is not implemented for this architecture"
        )
    if not parallel and new:
        raise fields.error("parallel_attn", "the new decoder architecture has parallel blocks: parallel_attn is false")
    if not parallel:
        return "pre"
    return "parallel" if new and norms != 1 else "parallel_shared"


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors: each is one leaf, or one layer of it. Rows of queries, keys and values form groups of a
    key-value head, as in memory."""
    return one_to_one(spec, MODULES | NORMS[spec.layer_kinds[0].placement], OUTSIDE, LAYERS)
