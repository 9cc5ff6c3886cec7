"""Architectures with recurrent layers: delta nets, state spaces and short convolutions."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshtune.families.gguf.architecture import (
    Architecture,
    Metadata,
    attention,
    attentions,
    by_layer,
    experts,
    integer,
)
from meshtune.families.gguf.routing import GATING
from meshtune.model.attention import AttentionSpec
from meshtune.model.delta_net import DeltaNetSpec
from meshtune.model.mlp import MlpSpec
from meshtune.model.short_conv import ShortConvSpec
from meshtune.model.spec import ModelSpec

SSM = ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count")


def _delta(spec: ModelSpec) -> DeltaNetSpec:
    return next(kind.mixer for kind in spec.layer_kinds if isinstance(kind.mixer, DeltaNetSpec))


def _interval(spec: ModelSpec) -> int:
    attended = by_layer(spec, lambda layer: isinstance(layer.mixer, AttentionSpec))
    return attended.index(True) + 1


def _delta_refusal(spec: ModelSpec) -> str | None:
    if not any(isinstance(kind.mixer, DeltaNetSpec) for kind in spec.layer_kinds) or not attentions(spec):
        return "it has no delta nets, or no attention beside them"
    interval = _interval(spec)
    attended = by_layer(spec, lambda layer: isinstance(layer.mixer, AttentionSpec))
    if attended != [(number + 1) % interval == 0 for number in range(spec.layers)]:
        return "layer_types: attention is not in every layer of one interval"
    delta = _delta(spec)
    if delta.key_dim != delta.value_dim:
        return "linear_key_head_dim and linear_value_head_dim differ"
    return None


def _delta_write(spec: ModelSpec) -> dict[str, Any]:
    delta, block = _delta(spec), experts(spec)
    fields = {
        **ssm(delta.taps, delta.values, delta.key_dim, delta.value_heads, delta.key_heads),
        "full_attention_interval": _interval(spec),
    }
    if block is not None and block.shared is not None:
        fields["expert_shared_feed_forward_length"] = block.shared.width
    return fields


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
        fields["shared_expert_intermediate_size"] = metadata["expert_shared_feed_forward_length"]
    return fields


def ssm(*numbers: int) -> dict[str, Any]:
    """The keys of a recurrent mixer, in the order of SSM."""
    return {f"ssm.{name}": number for name, number in zip(SSM, numbers, strict=True)}


def layer_kinds(metadata: Metadata, recurrent: str, attended: str) -> list[str]:
    """The names of the layers' types, of which those with heads of keys have attention."""
    heads = metadata["attention.head_count_kv"]
    layers = integer(metadata, "block_count")
    by_number = heads if isinstance(heads, list) else [heads] * layers
    return [attended if number else recurrent for number in by_number]


def _conv(spec: ModelSpec) -> ShortConvSpec | None:
    return next((kind.mixer for kind in spec.layer_kinds if isinstance(kind.mixer, ShortConvSpec)), None)


def _lfm2_refusal(spec: ModelSpec) -> str | None:
    if _conv(spec) is None or not attentions(spec):
        return "it has no short convolutions, or no attention beside them"
    return None


def _lfm2_write(spec: ModelSpec) -> dict[str, Any]:
    conv, block = _conv(spec), experts(spec)
    assert conv is not None
    fields: dict[str, Any] = {"shortconv.l_cache": conv.taps}
    if block is not None:
        fields |= {"expert_gating_func": GATING[block.router.scoring]}
        routed = by_layer(spec, lambda layer: experts_in(layer.ffn))
        fields["leading_dense_block_count"] = routed.count(False)
    return fields


def experts_in(ffn: Any) -> bool:
    """Whether a feed-forward network is a mixture of experts."""
    return not isinstance(ffn, MlpSpec)


def _lfm2_moe_refusal(spec: ModelSpec) -> str | None:
    block = experts(spec)
    if block is None or not block.router.normalize or block.router.scale != 1.0 or not block.router.correction:
        return "norm_topk_prob, routed_scaling_factor and use_expert_bias other than the published ones"
    return _lfm2_refusal(spec)


def _lfm2_read(metadata: Metadata) -> dict[str, Any]:
    return {
        "layer_types": layer_kinds(metadata, "conv", "full_attention"),
        "conv_L_cache": metadata["shortconv.l_cache"],
        "norm_eps": metadata["attention.layer_norm_rms_epsilon"],
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2_moe_read(metadata: Metadata) -> dict[str, Any]:
    fields = _lfm2_read(metadata) | {
        "num_dense_layers": metadata["leading_dense_block_count"],
        "moe_intermediate_size": metadata["expert_feed_forward_length"],
    }
    del fields["block_auto_adjust_ff_dim"]
    return fields


NEXT = Architecture(
    "qwen3next",
    "Qwen3NextForCausalLM",
    names={"mlp_norm": "post_attention_norm"},
    normalized=True,
    refusal=_delta_refusal,
    write=_delta_write,
    read=_delta_read,
    expects=("moe_intermediate_size",),
)
LFM2 = Architecture(
    "lfm2",
    "Lfm2ForCausalLM",
    names={"norm": "token_embd_norm"},
    marked_layers=True,
    head="embedding",
    refusal=_lfm2_refusal,
    write=_lfm2_write,
    read=_lfm2_read,
    without=("rms_norm_eps", "sliding_window", "head_dim"),
)
HYBRID: dict[str, Architecture] = {
    "qwen3_next": NEXT,
    "qwen3_5_text": dataclasses.replace(
        NEXT,
        name="qwen35",
        class_name="Qwen3_5ForCausalLM",
        tiled_values=True,
        write=_sections_write,
        without=("sliding_window",),
    ),
    "qwen3_5_moe_text": dataclasses.replace(
        NEXT,
        name="qwen35moe",
        class_name="Qwen3_5MoeForCausalLM",
        tiled_values=True,
        write=_sections_write,
        without=("sliding_window",),
    ),
    "lfm2": LFM2,
    "lfm2_moe": dataclasses.replace(
        LFM2,
        name="lfm2moe",
        class_name="Lfm2MoeForCausalLM",
        own_routing=True,
        refusal=_lfm2_moe_refusal,
        read=_lfm2_moe_read,
    ),
}
