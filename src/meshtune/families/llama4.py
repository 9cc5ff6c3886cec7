"""Llama 4 (text, alone or in a vision-language model): experts whose input is weighted in place of their result,
attention in chunks of a document, and layers that see all of it, without rotary embedding and with queries that grow
with their position."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshtune.families.config_fields import ConfigFields, read_rope
from meshtune.families.expert_layout import ExpertLayout
from meshtune.families.experts import column_half, experts_spec, shared_modules, transpose_experts
from meshtune.families.family import Family
from meshtune.families.llama import MODULES as LLAMA
from meshtune.families.llama import OUTSIDE, attention_spec, decoder_spec, mlp_spec, norm_spec
from meshtune.families.tensors import Stored, TensorMap, one_to_one
from meshtune.model.attention import AttentionSpec, LongQuerySpec
from meshtune.model.layer import LayerSpec
from meshtune.model.mlp import MlpSpec
from meshtune.model.norm import NormSpec
from meshtune.model.spec import ModelSpec

CHUNKED, FULL = "chunked_attention", "full_attention"
# Llama4TextConfig's, where they are not those of the other families.
DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 8192,
}
BLOCK = "feed_forward"
LAYOUT = ExpertLayout(transposed=True)
MODULES = {node: module.replace("mlp.", f"{BLOCK}.") for node, module in LLAMA.items()}

DESCRIPTIONS = {
    "llama4_text": Family(
        title="Llama 4 Scout and Maverick",
        special="attention in chunks of 8,192 tokens; in every fourth layer to all, without rotary embedding and with "
        "queries that grow with their position; a shared expert, and one of 16 or 128 experts",
        models=("meta-llama/Llama-4-Scout-17B-16E-Instruct", "meta-llama/Llama-4-Maverick-17B-128E-Instruct"),
        group="mixture of experts",
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """Llama4TextConfig -> ModelSpec. Which layers are rotated, and which attend in chunks, are fields of their own."""
    fields = ConfigFields(DEFAULTS | config, where)
    fields.harmless("cache_implementation", "for_llm_compressor")
    rotated, norm = _rotary_layers(fields), norm_spec(fields)
    kinds = fields.layer_types((CHUNKED, FULL), lambda index: CHUNKED if rotated[index] else FULL)
    chunk = fields.get("attention_chunk_size")
    if CHUNKED in kinds and chunk is None:
        raise fields.error("attention_chunk_size", "attention_chunk_size is null, and there are layers with chunks")
    attention = {layer: _attention(fields, *layer) for layer in zip(kinds, rotated, strict=True)}
    experts = experts_spec(
        fields, width="intermediate_size", router={"scoring": "sigmoid", "normalize": False}, scale_input=True
    )
    experts = dataclasses.replace(experts, shared=MlpSpec(experts.width, experts.activation))
    dense = dataclasses.replace(mlp_spec(fields), width=fields.integer("intermediate_size_mlp", 16384))
    layers = [
        LayerSpec(attention[kind, is_rotated], experts if is_sparse else dense, norm)
        for kind, is_rotated, is_sparse in zip(kinds, rotated, _sparse(fields), strict=True)
    ]
    return decoder_spec(fields, "llama4_text", "Llama4ForCausalLM", layers)


def _rotary_layers(fields: ConfigFields) -> list[bool]:
    """Which layers have a rotary embedding: no_rope_layers has a 1 for each that has one."""
    count, listed = fields.integer("num_hidden_layers"), fields.get("no_rope_layers")
    interval = fields.integer("no_rope_layer_interval", 4)
    if not listed:
        return [(index + 1) % interval != 0 for index in range(count)]
    if not isinstance(listed, list) or len(listed) < count or not set(listed) <= {0, 1}:
        raise fields.error("no_rope_layers", f"no_rope_layers must list 0 or 1 for each of the {count} layers")
    return [bool(entry) for entry in listed[:count]]


def _sparse(fields: ConfigFields) -> list[bool]:
    """Which layers have experts: those that moe_layers lists, or every interleave_moe_layer_step-th."""
    count, listed = fields.integer("num_hidden_layers"), fields.get("moe_layers")
    interval = fields.integer("interleave_moe_layer_step", 1)
    if listed is None:
        return [(index + 1) % interval == 0 for index in range(count)]
    if not isinstance(listed, list) or not set(listed) <= set(range(count)):
        raise fields.error("moe_layers", f"moe_layers must list numbers of layers, from 0 to {count - 1}")
    return [index in listed for index in range(count)]


def _attention(fields: ConfigFields, kind: str, is_rotated: bool) -> AttentionSpec:
    """Rotated layers normalise queries and keys after that; the others have the temperature that grows."""
    bias = bool(fields.get("attention_bias", False))
    attention = attention_spec(
        fields,
        rope=read_rope(fields, fields.integer("head_dim"), theta=500_000.0, interleaved=True),
        qkv_bias=bias,
        out_bias=bias,
        chunk=fields.integer("attention_chunk_size") if kind == CHUNKED else None,
    )
    beta, length = fields.number("attn_scale", 0.1), fields.integer("floor_scale", 8192)
    tuned, normalised = fields.get("attn_temperature_tuning", True), fields.get("use_qk_norm", True)
    if not is_rotated:
        return dataclasses.replace(
            attention, rope=None, long_query=LongQuerySpec(beta, length, offset=1) if tuned else None
        )
    norm = NormSpec(fields.number("rms_norm_eps"), "rms_plain") if normalised else None
    return dataclasses.replace(attention, qk_norm=norm, qk_norm_after_rope=True)


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors: experts are fused, [E, in, out], with the columns of the gate before those of up."""
    mixture = {
        "mlp/router": f"{BLOCK}.router",
        **shared_modules("shared_expert", BLOCK),
        **_experts(f"{BLOCK}.experts"),
    }
    return one_to_one(spec, {**MODULES, **mixture}, OUTSIDE)


def _experts(module: str) -> dict[str, Stored]:
    halves = {
        name: Stored(
            f"{module}.gate_up_proj",
            f"{module}.{name}_proj",
            lambda shape, part=part: column_half(shape, part),
            layout=LAYOUT,
        )
        for part, name in enumerate(("gate", "up"))
    }
    down = Stored(f"{module}.down_proj", f"{module}.down_proj", transpose_experts, layout=LAYOUT)
    return {f"mlp/experts/{name}": stored for name, stored in {**halves, "down": down}.items()}
