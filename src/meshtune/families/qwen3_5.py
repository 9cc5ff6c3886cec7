"""Qwen3.5's text model: gated delta nets, and in every fourth layer attention whose result is gated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshtune.families import qwen3
from meshtune.families.config_fields import ConfigFields, read_rope
from meshtune.families.family import OVERFLOWS_IN_UNSLOTH, Family
from meshtune.families.llama import MODULES, OUTSIDE, attention_spec, decoder_spec, head_sizes, mlp_spec
from meshtune.families.recurrent import LIMITS, with_head_groups
from meshtune.families.tensors import TensorMap, one_to_one
from meshtune.model.block import FeedForward
from meshtune.model.delta_net import DeltaNetSpec
from meshtune.model.layer import LayerSpec
from meshtune.model.norm import NormSpec
from meshtune.model.rope import RopeSpec
from meshtune.model.spec import ModelSpec

# Qwen3_5TextConfig's and Qwen3NextConfig's; published configs leave out what equals them.
DEFAULTS = {
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
DELTA_MODULES = {
    "delta_norm": "input_layernorm",
    "delta": "linear_attn",
    "delta/filter": "linear_attn.conv1d",
    "delta/norm": "linear_attn.norm",
    "delta/out": "linear_attn.out_proj",
}
IN_MODULES = {f"delta/{name}": f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a", "qkvz", "ba")}
UNUSED = ("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")

DESCRIPTIONS = {
    "qwen3_5_text": Family(
        title="Qwen3.5",
        special="gated delta nets in three of four layers, gated attention with partial rotation in the fourth",
        models=("Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-27B"),
        overflow=OVERFLOWS_IN_UNSLOTH,
        group="hybrid",
        template="chatml",
        limits=LIMITS,
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """Qwen3_5TextConfig -> ModelSpec."""
    fields = ConfigFields(DEFAULTS | config, where)
    for unused in UNUSED:
        fields.get(unused)
    fields.only("mlp_only_layers", None, [])
    layers = hybrid_layers(fields, [mlp_spec(fields)] * fields.integer("num_hidden_layers"))
    return decoder_spec(fields, "qwen3_5_text", "Qwen3_5ForCausalLM", layers)


def hybrid_layers(fields: ConfigFields, ffns: Sequence[FeedForward], fused: bool = False) -> list[LayerSpec]:
    """The layers around these feed-forward networks; `fused` is that of DeltaNetSpec."""
    fields.only("hidden_act", "silu")
    fields.only("attn_output_gate", True)
    fields.only("output_gate_type", "swish")  # of delta nets, as transformers has it
    norm = NormSpec(fields.number("rms_norm_eps", 1e-6), "rms_offset")
    bias = bool(fields.get("attention_bias", False))
    attention = attention_spec(fields, rope=_rope(fields), qkv_bias=bias, out_bias=bias, qk_norm=norm, gate="query")
    keys, values = fields.integer("linear_num_key_heads"), fields.integer("linear_num_value_heads")
    if values % keys:
        raise fields.error("linear_num_value_heads", f"{values} value heads do not divide over {keys} key heads")
    delta = DeltaNetSpec(
        keys,
        values,
        fields.integer("linear_key_head_dim"),
        fields.integer("linear_value_head_dim"),
        fields.integer("linear_conv_kernel_dim"),
        NormSpec(norm.eps),
        fused,
    )
    mixers = {"full_attention": attention, "linear_attention": delta}
    interval = fields.integer("full_attention_interval", 4)

    def default(index: int) -> str:
        return "linear_attention" if (index + 1) % interval else "full_attention"

    kinds = fields.layer_types(tuple(mixers), default)
    return [LayerSpec(mixers[kind], ffn, norm) for kind, ffn in zip(kinds, ffns, strict=True)]


def _rope(fields: ConfigFields) -> RopeSpec:
    """The rotary embedding of a quarter of each head."""
    return read_rope(fields, head_sizes(fields)[2], theta=10_000.0, rotated=0.25, mrope="interleaved")


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors: each is one leaf, or one layer of it; rows of queries, keys and values stand key head by
    key head in memory."""
    table = one_to_one(spec, MODULES | qwen3.NORMS | DELTA_MODULES | IN_MODULES, OUTSIDE)
    return with_key_heads(table, spec)


def with_key_heads(table: Sequence[TensorMap], spec: ModelSpec) -> list[TensorMap]:
    """The table with the rows of the delta nets' projections and filters as files have them."""
    delta = next((block for block in spec.blocks if isinstance(block, DeltaNetSpec)), None)
    if delta is None:
        return list(table)
    keys = delta.key_heads * delta.key_dim
    for ending in ("delta/qkv/weight", "delta/filter/weight"):
        table = with_head_groups(table, ending, (keys, keys, delta.values), delta.key_heads)
    return list(table)
