"""Gemma 3n's text model, by itself or in a multimodal model: several residual streams, per-layer embeddings, low-rank
residuals in parallel to attention, sparse networks, and keys and values shared between layers
(https://ai.google.dev/gemma/docs/gemma-3n)."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshtune.families import gemma2, gemma4, qwen3
from meshtune.families.config_fields import ConfigFields, read_activation, read_ropes
from meshtune.families.family import OVERFLOWS_IN_UNSLOTH, Family
from meshtune.families.gemma4 import FULL, SLIDING, shared_layers, with_shared_memory
from meshtune.families.llama import MODULES, OUTSIDE, attention_spec, decoder_spec
from meshtune.families.tensors import Stored, TensorMap, View, one_to_one
from meshtune.model.attention import AttentionSpec
from meshtune.model.block import ENTER, LEAVE
from meshtune.model.layer import LayerSpec
from meshtune.model.layer_extras import AltUpSpec, LaurelSpec, LayerExtras, PerLayerEmbedding, PerLayerSpec, StreamsSpec
from meshtune.model.mlp import MlpSpec
from meshtune.model.norm import NormSpec
from meshtune.model.spec import ModelSpec

# Gemma3nTextConfig's; the configs of published models leave out what equals them.
DEFAULTS = {
    "vocab_size": 262_400,
    "hidden_size": 2048,
    "intermediate_size": 16_384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_activation": gemma2.TANH,
    "max_position_embeddings": 32_768,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "altup_coef_clip": 120.0,
    "altup_num_inputs": 4,
    "num_kv_shared_layers": 15,
    "laurel_rank": 64,
}
THETAS = {FULL: ("rope_theta", 1_000_000.0), SLIDING: ("rope_local_base_freq", 10_000.0)}
SPARSE_LAYERS, SPARSITY = 10, 0.95  # of models of more layers than that, where the config does not say
STREAMS = {
    "streams/router": "altup.modality_router",
    "streams/router_norm": "altup.router_norm",
    "streams/predict": "altup.prediction_coefs",
    "streams/correct": "altup.correction_coefs",
    "streams/scale/weight": Stored("altup.correct_output_scale", "altup.correct_output_scale", View.identity),
    "laurel/left": "laurel.linear_left",
    "laurel/right": "laurel.linear_right",
    "laurel/norm": "laurel.post_laurel_norm",
}

DESCRIPTIONS = {
    "gemma3n_text": Family(
        title="Gemma 3n",
        special="four residual streams (AltUp), low-rank residuals beside attention (LAuReL), per-layer embeddings, "
        "networks of which 5% are active in the first layers, layers that share keys and values",
        models=("google/gemma-3n-E2B-it", "google/gemma-3n-E4B-it"),
        overflow=OVERFLOWS_IN_UNSLOTH,
        template="gemma",
        limits={
            "expand": "per-layer embeddings and shared keys and values are for the layers that there are",
            "loftq": "not on all-linear: projections outside the layers are not quantised",
        },
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """Gemma3nTextConfig -> ModelSpec, with transformers' defaults for absent fields."""
    fields = ConfigFields(DEFAULTS | config, where)
    fields.only("use_bidirectional_attention", None, False)
    fields.harmless("altup_lr_multiplier", "query_pre_attn_scalar")  # published, and read by no forward pass
    norm = NormSpec(fields.number("rms_norm_eps", 1e-6))
    kinds = fields.layer_types((SLIDING, FULL), lambda index: SLIDING if (index + 1) % 5 else FULL)
    attentions = with_shared_memory(_attentions(fields, norm), kinds, shared_layers(fields, kinds))
    mlps, streams = _mlps(fields), _streams(fields, norm)
    laurel, width = LaurelSpec(fields.integer("laurel_rank"), norm), fields.integer("hidden_size_per_layer_input")
    extras = LayerExtras(laurel, streams, PerLayerSpec(width, norm, mlps[0].activation))
    layers = [
        LayerSpec(attention, mlp, norm, "both", extras=extras) for attention, mlp in zip(attentions, mlps, strict=True)
    ]
    return decoder_spec(
        fields,
        "gemma3n_text",
        "Gemma3nForCausalLM",
        layers,
        embed_scale=fields.integer("hidden_size") ** 0.5,
        logit_softcap=None
        if fields.get("final_logit_softcapping") is None
        else fields.number("final_logit_softcapping"),
        side=PerLayerEmbedding(fields.integer("vocab_size_per_layer_input"), len(layers), width, norm),
        streams=StreamsSpec(streams.count),
    )


def _attentions(fields: ConfigFields, norm: NormSpec) -> dict[str, AttentionSpec]:
    """The attention of each layer type."""
    ropes = read_ropes(fields, fields.integer("head_dim"), THETAS, scaled=(FULL,))
    bias = bool(fields.get("attention_bias", False))
    full = attention_spec(
        fields,
        rope=ropes[FULL],
        scale=1.0,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=norm,
        v_norm=NormSpec(norm.eps, "rms_plain"),
    )
    return {
        FULL: full,
        SLIDING: dataclasses.replace(full, rope=ropes[SLIDING], window=fields.integer("sliding_window")),
    }


def _mlps(fields: ConfigFields) -> list[MlpSpec]:
    """The feed-forward network of every layer: width and sparsity are lists, or the same for all."""
    count, activation = fields.integer("num_hidden_layers"), read_activation(fields, "hidden_activation", gemma2.TANH)
    widths, shares = fields.get("intermediate_size"), fields.get("activation_sparsity_pattern")
    widths = widths if isinstance(widths, list) else [fields.integer("intermediate_size")] * count
    if shares is None:
        sparse = SPARSE_LAYERS if count > SPARSE_LAYERS else 0
        shares = [SPARSITY] * sparse + [0.0] * (count - sparse)
    if len(widths) != count or not all(isinstance(width, int) and width > 0 for width in widths):
        raise fields.error("intermediate_size", f"intermediate_size {widths!r} has no width for each of {count} layers")
    if not isinstance(shares, list) or len(shares) != count or not all(0 <= share < 1 for share in shares):
        raise fields.error(
            "activation_sparsity_pattern",
            f"activation_sparsity_pattern {shares!r} has no share from 0 to less than 1 for each of {count} layers",
        )
    return [
        MlpSpec(width, activation, sparsity=float(share) or None) for width, share in zip(widths, shares, strict=True)
    ]


def _streams(fields: ConfigFields, norm: NormSpec) -> AltUpSpec:
    count, active, clip = fields.integer("altup_num_inputs"), fields.get("altup_active_idx", 0), None
    if not isinstance(active, int) or not 0 <= active < count:
        raise fields.error("altup_active_idx", f"altup_active_idx {active!r} is none of {count} streams")
    if fields.get("altup_coef_clip") is not None:
        clip = fields.number("altup_coef_clip")
    return AltUpSpec(count, active, norm, clip, bool(fields.get("altup_correct_scale", True)))


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors: each is one leaf, or one layer of it."""
    modules = MODULES | gemma2.NORMS | qwen3.NORMS | gemma4.PLE | STREAMS
    count = 1 if spec.streams is None else spec.streams.count
    projections = {
        f"{node}/{number}": f"model.{name}.{number - 1}"
        for node, name in ((ENTER, "altup_projections"), (LEAVE, "altup_unembed_projections"))
        for number in range(1, count)
    }
    return one_to_one(spec, modules, OUTSIDE | gemma4.PLE_OUTSIDE | projections)
