"""Gemma 4's text model, alone or in a multimodal model: heads of another size in full-attention layers, keys and values
shared between layers, per-layer embeddings, and experts in parallel to the dense network
(https://ai.google.dev/gemma/docs)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshtune.families import gemma2, qwen3
from meshtune.families.config_fields import ConfigFields, read_ropes
from meshtune.families.experts import experts_spec, fused_modules
from meshtune.families.family import OVERFLOWS_IN_UNSLOTH, Family
from meshtune.families.llama import MODULES, OUTSIDE, decoder_spec, mlp_spec
from meshtune.families.tensors import Stored, TensorMap, View, one_to_one
from meshtune.model.attention import AttentionSpec
from meshtune.model.experts import ExpertsSpec
from meshtune.model.layer import LayerSpec
from meshtune.model.layer_extras import LayerExtras, PerLayerEmbedding, PerLayerSpec
from meshtune.model.norm import NormSpec
from meshtune.model.spec import ModelSpec

SLIDING, FULL = "sliding_attention", "full_attention"
# Gemma4TextConfig's; the configs of published models leave out what equals them.
DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": gemma2.TANH,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
}
UNIFIED = {"max_position_embeddings": 262_144, "sliding_window": 1024, "hidden_size_per_layer_input": 0}
THETAS = {FULL: ("rope_theta", 1_000_000.0), SLIDING: ("rope_theta", 10_000.0)}
PLE = {
    "per_layer/gate": "per_layer_input_gate",
    "per_layer/out": "per_layer_projection",
    "per_layer/norm": "post_per_layer_input_norm",
    "scalar/weight": Stored("layer_scalar", "layer_scalar", View.identity),
}
PLE_OUTSIDE = {
    "per_layer/table": "model.embed_tokens_per_layer",
    "per_layer/projection": "model.per_layer_model_projection",
    "per_layer/norm": "model.per_layer_projection_norm",
}
EXPERTS = {
    "mlp/shared/gate": "mlp.gate_proj",
    "mlp/shared/up": "mlp.up_proj",
    "mlp/shared/down": "mlp.down_proj",
    "mlp/shared_norm": "pre_feedforward_layernorm",
    "mlp/shared_post_norm": "post_feedforward_layernorm_1",
    "mlp/norm": "pre_feedforward_layernorm_2",
    "mlp/post_norm": "post_feedforward_layernorm_2",
    "mlp/router": "router.proj",
    "mlp/router/scales": "router",
}

DESCRIPTIONS = {
    "gemma4_text": Family(
        title="Gemma 4",
        special="normalised values, wider heads in full-attention layers, whose values may be their keys, layers that "
        "share keys and values, per-layer embeddings; experts beside the dense network in the 26B-A4B",
        models=("google/gemma-4-E2B-it", "google/gemma-4-31B-it", "google/gemma-4-26B-A4B-it"),
        overflow=OVERFLOWS_IN_UNSLOTH,
        mixture=True,
        limits={"expand": "per-layer embeddings and shared keys and values are for the layers that there are"},
    ),
    "gemma4_unified_text": Family(
        title="Gemma 4 12B",
        special="Gemma 4 without per-layer embeddings, in one model with images and sound",
        models=("google/gemma-4-12B-it",),
        overflow=OVERFLOWS_IN_UNSLOTH,
        limits={"expand": "shared keys and values are for the layers that there are"},
    ),
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """Gemma4TextConfig or Gemma4UnifiedTextConfig -> ModelSpec, with transformers' defaults for absent fields."""
    unified = config["model_type"] == "gemma4_unified_text"
    fields = ConfigFields(DEFAULTS | (UNIFIED if unified else {}) | config, where)
    fields.only("use_bidirectional_attention", None, "vision")  # of images alone
    fields.harmless("sliding_window_pattern")  # layer_types says it, and transformers reads that alone
    norm = NormSpec(fields.number("rms_norm_eps", 1e-6))
    kinds = _layer_types(fields)
    shared, layers = shared_layers(fields, kinds), []
    attentions = with_shared_memory(_attentions(fields, norm, kinds), kinds, shared)
    wide = 2 if fields.get("use_double_wide_mlp", False) else 1
    mlp, width = mlp_spec(fields, "hidden_activation"), int(fields.get("hidden_size_per_layer_input", 0))
    experts = _experts(fields, norm)
    extras = LayerExtras(per_layer=PerLayerSpec(width, norm, mlp.activation) if width else None, scalar=True)
    for attention in attentions:
        ffn = mlp if attention.reads is None else dataclasses.replace(mlp, width=wide * mlp.width)
        if experts is not None:
            ffn = dataclasses.replace(experts, shared=ffn)
        layer = LayerSpec(attention, ffn, norm, "both", ffn_norm=experts is None, extras=extras)
        layers.append(layer)
    rows = fields.integer("vocab_size_per_layer_input", fields.integer("vocab_size"))
    return decoder_spec(
        fields,
        config["model_type"],
        "Gemma4UnifiedForCausalLM" if unified else "Gemma4ForCausalLM",
        layers,
        embed_scale=fields.integer("hidden_size") ** 0.5,
        logit_softcap=None
        if fields.get("final_logit_softcapping") is None
        else fields.number("final_logit_softcapping"),
        side=PerLayerEmbedding(rows, len(layers), width, norm) if width else None,
    )


def _layer_types(fields: ConfigFields) -> list[str]:
    """The layer types; the last is full attention whatever the config says."""
    kinds = fields.layer_types((SLIDING, FULL), lambda index: SLIDING if (index + 1) % 6 else FULL)
    return [*kinds[:-1], FULL]


def _experts(fields: ConfigFields, norm: NormSpec) -> ExpertsSpec | None:
    """The experts next to the dense network, which is their shared one; None in a dense model."""
    if not fields.get("enable_moe_block", False):
        for unused in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            fields.get(unused)
        return None
    router = {"norm": NormSpec(norm.eps, "rms_plain"), "input_scale": True, "expert_scale": True}
    return experts_spec(fields, top_k="top_k_experts", activation="hidden_activation", router=router, norm=norm)


def with_shared_memory(attentions: Mapping[str, AttentionSpec], kinds: list[str], shared: int) -> list[AttentionSpec]:
    """The attention of every layer, given that of each layer type: the last `shared` layers read the keys and values
    of the last layer of their type before them."""
    first = len(kinds) - shared
    writers, readers = kinds[:first], kinds[first:]
    last = {kind: max(index for index, writer in enumerate(writers) if writer == kind) for kind in set(readers)}
    return [
        dataclasses.replace(attentions[kind], stores=kind if last.get(kind) == index else None)
        for index, kind in enumerate(writers)
    ] + [dataclasses.replace(attentions[kind], reads=kind) for kind in readers]


def shared_layers(fields: ConfigFields, kinds: list[str]) -> int:
    """The number of last layers that read keys and values of earlier ones."""
    shared = fields.get("num_kv_shared_layers", 0)
    if not isinstance(shared, int) or not 0 <= shared < len(kinds):
        raise fields.error("num_kv_shared_layers", f"{shared!r} of {len(kinds)} layers share keys and values")
    if missing := set(kinds) - set(kinds[: len(kinds) - shared]):
        raise fields.error(
            "num_kv_shared_layers", f"no layer before the last {shared} has keys and values for {min(missing)}"
        )
    return shared


def _attentions(fields: ConfigFields, norm: NormSpec, kinds: list[str]) -> dict[str, AttentionSpec]:
    """The attention of each layer type."""
    heads, head_dim = fields.integer("num_attention_heads"), fields.integer("head_dim")
    kv_heads, tied = fields.integer("num_key_value_heads"), bool(fields.get("attention_k_eq_v", False))
    full = _full_attention(fields, kinds, {"head_dim": head_dim, "num_key_value_heads": kv_heads}, tied)
    sizes = {SLIDING: (kv_heads, head_dim), FULL: (full["num_key_value_heads"], full["head_dim"])}
    ropes = read_ropes(fields, {kind: size for kind, (_, size) in sizes.items()}, THETAS, scaled=(FULL,))
    bias = bool(fields.get("attention_bias", False))
    for kind, (count, size) in sizes.items():
        if heads % count or size % 2:
            raise fields.error(
                "num_global_key_value_heads" if kind == FULL else "num_key_value_heads",
                f"{heads} heads of {size} numbers with {count} key-value heads in {kind} layers",
            )
    window = fields.integer("sliding_window")
    return {
        kind: AttentionSpec(
            heads,
            count,
            size,
            rope=ropes[kind],
            window=window if kind == SLIDING else None,
            scale=1.0,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=norm,
            v_norm=NormSpec(norm.eps, "rms_plain"),
            v_of_k=tied and kind == FULL,
        )
        for kind, (count, size) in sizes.items()
    }


def _full_attention(fields: ConfigFields, kinds: list[str], usual: Mapping[str, int], tied: bool) -> Mapping[str, int]:
    """Head size and key-value heads of full-attention layers: in fields of their own, or, as transformers writes them,
    in per_layer_config, by the number of the layer."""
    special = {"head_dim": fields.integer("global_head_dim", 512)}
    if tied and fields.get("num_global_key_value_heads") is not None:
        special["num_key_value_heads"] = fields.integer("num_global_key_value_heads")
    fields.get("num_global_key_value_heads")
    by_layer = fields.get("per_layer_config")
    if by_layer is None:
        return {**usual, **special}
    full = {index for index, kind in enumerate(kinds) if kind == FULL}
    overrides = {int(index): values for index, values in by_layer.items()} if isinstance(by_layer, Mapping) else {}
    first = overrides.get(min(full), {})
    if (
        overrides.keys() - full
        or any(overrides.get(index, {}) != first for index in full)
        or first.keys() - usual.keys()
    ):
        raise fields.error(
            "per_layer_config",
            f"per_layer_config {by_layer!r} does not give all full-attention layers, and no others, the same "
            f"{' and '.join(usual)}",
        )
    return {**usual, **first}


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors: each is one leaf, or one layer of it."""
    modules = MODULES | gemma2.NORMS | qwen3.NORMS | PLE | fused_modules("experts") | EXPERTS
    return one_to_one(spec, modules, OUTSIDE | PLE_OUTSIDE)
