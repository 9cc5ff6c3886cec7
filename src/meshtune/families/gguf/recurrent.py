"""Models with recurrent layers: Qwen's delta nets, LFM2's short convolutions, Granite's Mamba-2."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeVar

from meshtune.families.gguf.architecture import (
    GATING,
    QKV,
    SHARED_WIDTH,
    Architecture,
    Metadata,
    attended_layers,
    attention,
    attentions,
    experts,
    integer,
    routed_layers,
    shared_width,
)
from meshtune.model.delta_net import DeltaNetSpec
from meshtune.model.mamba2 import Mamba2Spec
from meshtune.model.short_conv import ShortConvSpec
from meshtune.model.spec import ModelSpec

SSM = ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count")
LEAST_STEP = 1e-3  # of time steps, which transformers has on CPUs, and no kernel for GPUs
Recurrent = TypeVar("Recurrent", DeltaNetSpec, Mamba2Spec, ShortConvSpec)


def _mixer(spec: ModelSpec, kind: type[Recurrent]) -> Recurrent:
    return next(layer.mixer for layer in spec.layer_kinds if isinstance(layer.mixer, kind))


def _lacks(spec: ModelSpec, kind: type[Recurrent]) -> bool:
    """Whether a model has no layers of a kind, or no attention besides."""
    return not any(isinstance(layer.mixer, kind) for layer in spec.layer_kinds) or not attentions(spec)


def _ssm(*numbers: int) -> dict[str, Any]:
    """The keys of a recurrent mixer, in the order of SSM."""
    return {f"ssm.{name}": number for name, number in zip(SSM, numbers, strict=True)}


def _layer_types(metadata: Metadata, recurrent: str, attended: str) -> list[str]:
    """The names of the layers' types: layers with heads of keys have attention."""
    heads = metadata["attention.head_count_kv"]
    by_number = heads if isinstance(heads, list) else [heads] * integer(metadata, "block_count")
    return [attended if number else recurrent for number in by_number]


def _interval(spec: ModelSpec) -> int:
    return attended_layers(spec).index(True) + 1


def _delta_refusal(spec: ModelSpec) -> str | None:
    if _lacks(spec, DeltaNetSpec):
        return "it has no delta nets, or no attention beside them"
    interval, delta = _interval(spec), _mixer(spec, DeltaNetSpec)
    if attended_layers(spec) != [(number + 1) % interval == 0 for number in range(spec.layers)]:
        return "layer_types: attention is not in every layer of one interval"
    if delta.key_dim != delta.value_dim:
        return "linear_key_head_dim and linear_value_head_dim differ"
    return None


def _delta_write(spec: ModelSpec) -> dict[str, Any]:
    delta = _mixer(spec, DeltaNetSpec)
    sizes = _ssm(delta.taps, delta.values, delta.key_dim, delta.value_heads, delta.key_heads)
    return {**sizes, "full_attention_interval": _interval(spec), **shared_width(spec)}


def _sections_write(spec: ModelSpec) -> dict[str, Any]:
    rope = attention(spec).rope
    pairs = 0 if rope is None else rope.dim // 2
    # Pairs are rotated by one of three positions in turn, which are equal for text.
    sections = [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0]
    return _delta_write(spec) | {"rope.dimension_sections": sections}


def _delta_read(metadata: Metadata) -> dict[str, Any]:
    heads = integer(metadata, "ssm.time_step_rank")
    fields = {
        "linear_conv_kernel_dim": metadata["ssm.conv_kernel"],
        "linear_key_head_dim": metadata["ssm.state_size"],
        "linear_value_head_dim": integer(metadata, "ssm.inner_size") // heads,
        "linear_num_key_heads": metadata["ssm.group_count"],
        "linear_num_value_heads": heads,
        "full_attention_interval": metadata.get("full_attention_interval", 4),
    }
    if "expert_count" in metadata:
        fields["moe_intermediate_size"] = metadata["expert_feed_forward_length"]
        fields["shared_expert_intermediate_size"] = metadata[SHARED_WIDTH]
    return fields


def _lfm2_refusal(spec: ModelSpec) -> str | None:
    return "it has no short convolutions, or no attention beside them" if _lacks(spec, ShortConvSpec) else None


def _lfm2_write(spec: ModelSpec) -> dict[str, Any]:
    block = experts(spec)
    fields: dict[str, Any] = {"shortconv.l_cache": _mixer(spec, ShortConvSpec).taps}
    if block is not None:
        fields["expert_gating_func"] = GATING[block.router.scoring]
        fields["leading_dense_block_count"] = routed_layers(spec).count(False)
    return fields


def _lfm2_moe_refusal(spec: ModelSpec) -> str | None:
    block = experts(spec)
    if block is None or not block.router.normalize or block.router.scale != 1.0 or not block.router.correction:
        return "norm_topk_prob, routed_scaling_factor and use_expert_bias other than the published ones"
    return _lfm2_refusal(spec)


def _lfm2_fields(metadata: Metadata) -> dict[str, Any]:
    return {
        "layer_types": _layer_types(metadata, "conv", "full_attention"),
        "conv_L_cache": metadata["shortconv.l_cache"],
        "norm_eps": metadata["attention.layer_norm_rms_epsilon"],
    }


def _lfm2_read(metadata: Metadata) -> dict[str, Any]:
    return _lfm2_fields(metadata) | {"block_auto_adjust_ff_dim": False}


def _lfm2_moe_read(metadata: Metadata) -> dict[str, Any]:
    return _lfm2_fields(metadata) | {
        "num_dense_layers": metadata["leading_dense_block_count"],
        "moe_intermediate_size": metadata["expert_feed_forward_length"],
    }


def _granite_refusal(spec: ModelSpec) -> str | None:
    if _lacks(spec, Mamba2Spec):
        return "it has no Mamba layers, or no attention beside them"
    mamba = _mixer(spec, Mamba2Spec)
    if not mamba.filter_bias:
        return "filters without biases (use_conv_bias)"
    if mamba.dt_limit[1] != math.inf or mamba.dt_limit[0] > LEAST_STEP:
        return "time steps are limited (time_step_limit)"
    return "its result is normalised before it is gated" if mamba.norm and not mamba.gate_first else None


def _granite_write(spec: ModelSpec) -> dict[str, Any]:
    block, mixer, mamba = experts(spec), attention(spec), _mixer(spec, Mamba2Spec)
    fields = {
        **_ssm(mamba.taps, mamba.inner, mamba.state, mamba.heads, mamba.groups),
        "attention.scale": mixer.scale,
        "embedding_scale": spec.embed_scale,
        "residual_scale": spec.layer_kinds[0].scale,
        "logit_scale": 1 / (spec.logit_scale or 1.0),
        "rope.scaling.finetuned": mixer.rope is not None,
        **shared_width(spec),
    }
    return fields | ({"feed_forward_length": block.width} if block is not None and block.shared is not None else {})


def _granite_read(metadata: Metadata) -> dict[str, Any]:
    heads, inner = integer(metadata, "ssm.time_step_rank"), integer(metadata, "ssm.inner_size")
    return {
        "attention_multiplier": metadata.get("attention.scale", 1.0),
        "embedding_multiplier": metadata.get("embedding_scale", 1.0),
        "residual_multiplier": metadata.get("residual_scale", 1.0),
        "logits_scaling": metadata.get("logit_scale", 1.0),
        "position_embedding_type": "rope" if metadata.get("rope.scaling.finetuned") else "nope",
        "layer_types": _layer_types(metadata, "mamba", "attention"),
        "num_local_experts": metadata.get("expert_count", 0),
        "shared_intermediate_size": metadata.get(SHARED_WIDTH, metadata["feed_forward_length"]),
        "mamba_expand": inner // integer(metadata, "embedding_length"),
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_d_state": metadata["ssm.state_size"],
        "mamba_n_groups": metadata["ssm.group_count"],
        "mamba_d_conv": metadata["ssm.conv_kernel"],
    }


QWEN3_NEXT = Architecture(
    "qwen3next",
    "Qwen3NextForCausalLM",
    normalized=True,
    refusal=_delta_refusal,
    write=_delta_write,
    read=_delta_read,
)
QWEN35 = dataclasses.replace(
    QWEN3_NEXT,
    name="qwen35",
    class_name="Qwen3_5ForCausalLM",
    tiled_values=True,
    write=_sections_write,
    without=("sliding_window",),
)
LFM2 = Architecture(
    "lfm2",
    "Lfm2ForCausalLM",
    marked_layers=True,
    head="embedding",
    refusal=_lfm2_refusal,
    write=_lfm2_write,
    read=_lfm2_read,
    without=("rms_norm_eps", "sliding_window", "head_dim"),
)
RECURRENT: dict[str, Architecture] = {
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5_text": QWEN35,
    "qwen3_5_moe_text": dataclasses.replace(QWEN35, name="qwen35moe", class_name="Qwen3_5MoeForCausalLM"),
    "lfm2": LFM2,
    "lfm2_moe": dataclasses.replace(
        LFM2,
        name="lfm2moe",
        class_name="Lfm2MoeForCausalLM",
        own_routing=True,
        refusal=_lfm2_moe_refusal,
        read=_lfm2_moe_read,
    ),
    "granitemoehybrid": Architecture(
        "granitehybrid",
        "GraniteMoeHybridForCausalLM",
        biases=QKV | {"mamba/filter"},
        permuted=True,
        normalized=True,
        own_scale=True,
        marked_layers=True,
        parted_gate_up=True,
        refusal=_granite_refusal,
        write=_granite_write,
        read=_granite_read,
        without=("sliding_window", "head_dim", "num_experts"),
    ),
}
