"""Architectures of newer design whose layers differ in their windows or rotary embeddings."""

from __future__ import annotations

from typing import Any

from meshtune.families.gguf.architecture import (
    QKV,
    WINDOW,
    Architecture,
    Metadata,
    attention,
    by_layer,
    experts,
    integer,
    layer_windows,
)
from meshtune.families.gguf.rope import LOG_MULTIPLIER, rope_block
from meshtune.families.gguf.routing import deepseek_fields, routed_layers
from meshtune.model.attention import AttentionSpec
from meshtune.model.spec import ModelSpec

SHARED_WIDTH = "expert_shared_feed_forward_length"
LAYERS_WITH_WINDOWS = 64  # of EXAONE 4, whose windows llama.cpp knows by that
LLAMA4_CHUNK, LLAMA4_BETA, LLAMA4_LENGTH = 8192, 0.1, 8192  # which llama.cpp has as constants
LLAMA4_PLAIN = 128  # experts of the model whose queries and keys are not normalised
OSS_LIMIT = 7.0  # of the activation of gpt-oss, which llama.cpp has as a constant


def window(spec: ModelSpec) -> int | None:
    """The sliding window of the layers that have one."""
    return next((number for number in layer_windows(spec) if number is not None), None)


def other_windows(spec: ModelSpec, period: int) -> str | None:
    """What llama.cpp does not compute where it expects every layer of `period`, but the last, to have a window."""
    expected = [None if (number + 1) % period == 0 else window(spec) for number in range(spec.layers)]
    return None if layer_windows(spec) == expected else "layer_types: llama.cpp has another order of windows"


def _oss_refusal(spec: ModelSpec) -> str | None:
    block = experts(spec)
    if block is None or block.clamp != OSS_LIMIT:
        return f"swiglu_limit is not {OSS_LIMIT:g}"
    return other_windows(spec, 2)


def _oss_read(metadata: Metadata) -> dict[str, Any]:
    return {
        "num_local_experts": metadata["expert_count"],
        "intermediate_size": metadata["expert_feed_forward_length"],
        "sliding_window": metadata[WINDOW],
    }


def _oss_rope(block: dict[str, Any]) -> dict[str, Any]:
    """Published models have YaRN without rounded bounds, which files do not say."""
    return block | {"truncate": False} if block["rope_type"] == "yarn" else block


def _local(spec: ModelSpec) -> str | None:
    """What llama.cpp does not compute where layers with windows are rotated and others are not."""
    for kind in spec.layer_kinds:
        mixer = kind.mixer
        if isinstance(mixer, AttentionSpec) and (mixer.window is None) != (mixer.rope is None):
            return "layers with windows that are not rotated, or layers without that are"
    return other_windows(spec, 4)


def _exaone4_refusal(spec: ModelSpec) -> str | None:
    if window(spec) is None:
        return None
    return _local(spec) if spec.layers == LAYERS_WITH_WINDOWS else "windows in a model of another depth than 64 layers"


def _exaone4_write(spec: ModelSpec) -> dict[str, Any]:
    return {WINDOW: window(spec)}


def _exaone4_read(metadata: Metadata) -> dict[str, Any]:
    return {"sliding_window": metadata.get(WINDOW), **_pattern(metadata)}


def _pattern(metadata: Metadata) -> dict[str, Any]:
    return {"sliding_window_pattern": "LLLG"} if metadata.get(WINDOW) else {}


def _shared_width(spec: ModelSpec) -> dict[str, Any]:
    block = experts(spec)
    return {} if block is None or block.shared is None else {SHARED_WIDTH: block.shared.width}


def _exaone_moe_write(spec: ModelSpec) -> dict[str, Any]:
    return {WINDOW: window(spec), **_shared_width(spec)}


def _exaone_moe_read(metadata: Metadata) -> dict[str, Any]:
    fields = deepseek_fields(metadata)
    shared, experts_in = fields.pop("n_shared_experts"), fields.pop("n_routed_experts")
    return {**fields, **_exaone4_read(metadata), "num_shared_experts": shared, "num_experts": experts_in}


def _shared(spec: ModelSpec) -> str | None:
    block = experts(spec)
    return "it has no shared experts" if block is None or block.shared is None else None


def _afmoe_refusal(spec: ModelSpec) -> str | None:
    if spec.embed_scale != spec.embed**0.5:
        return "mup_enabled is False"
    return _shared(spec) or _local(spec)


def _afmoe_read(metadata: Metadata) -> dict[str, Any]:
    return {
        "sliding_window": metadata[WINDOW],
        "mup_enabled": True,
        "num_shared_experts": metadata["expert_shared_count"],
        "num_dense_layers": metadata.get("leading_dense_block_count", 0),
        "route_scale": metadata.get("expert_weights_scale", 1.0),
        "moe_intermediate_size": metadata["expert_feed_forward_length"],
    }


def _hunyuan_write(spec: ModelSpec) -> dict[str, Any]:
    return {"expert_shared_count": 1, **_shared_width(spec)}


def _hunyuan_read(metadata: Metadata) -> dict[str, Any]:
    return {"moe_topk": metadata["expert_used_count"], "num_shared_expert": 1}


def _ernie_write(spec: ModelSpec) -> dict[str, Any]:
    return {"interleave_moe_layer_step": 1, **_shared_width(spec)}


def _ernie_refusal(spec: ModelSpec) -> str | None:
    block = experts(spec)
    if block is not None and (block.router.scoring != "softmax" or not block.router.normalize):
        return "experts that are not normalised"
    return None


def _ernie_read(metadata: Metadata) -> dict[str, Any]:
    return {
        "moe_num_experts": metadata["expert_count"],
        "moe_k": metadata["expert_used_count"],
        "moe_intermediate_size": metadata["expert_feed_forward_length"],
        "moe_num_shared_experts": metadata.get("expert_shared_count", 0),
        "moe_layer_start_index": metadata["leading_dense_block_count"],
    }


def _llama4_refusal(spec: ModelSpec) -> str | None:
    block = experts(spec)
    if block is None:
        return "it has no experts"
    normed = block.router.experts != LLAMA4_PLAIN
    mixers = by_layer(spec, lambda layer: layer.mixer)
    for number, mixer in enumerate(mixers):
        assert isinstance(mixer, AttentionSpec)
        growth = mixer.long_query
        if (mixer.rope is None) != ((number + 1) % 4 == 0):
            return "no_rope_layers other than every fourth"
        if mixer.rope is None and (growth is None or (growth.beta, growth.length) != (LLAMA4_BETA, LLAMA4_LENGTH)):
            return "attn_scale and floor_scale other than the published ones, or no attn_temperature_tuning"
        if mixer.rope is not None and (mixer.qk_norm is not None) != normed:
            return "use_qk_norm: llama.cpp chooses it by the number of experts"
        if mixer.rope is not None and mixer.chunk != LLAMA4_CHUNK:
            return f"attention_chunk_size is not {LLAMA4_CHUNK}"
    routed, step = routed_layers(spec), _step(spec)
    return (
        None if routed == [(number + 1) % step == 0 for number in range(spec.layers)] else "moe_layers of no interval"
    )


def _step(spec: ModelSpec) -> int:
    return routed_layers(spec).index(True) + 1


def _llama4_read(metadata: Metadata) -> dict[str, Any]:
    return {
        "num_local_experts": metadata["expert_count"],
        "intermediate_size": metadata["expert_feed_forward_length"],
        "intermediate_size_mlp": metadata["feed_forward_length"],
        "interleave_moe_layer_step": metadata["interleave_moe_layer_step"],
        "use_qk_norm": metadata["expert_count"] != LLAMA4_PLAIN,
    }


def _ministral_write(spec: ModelSpec) -> dict[str, Any]:
    growth, rope = attention(spec).long_query, attention(spec).rope
    assert rope is not None
    share = dict(rope.parameters).get("mscale_all_dim")
    return {
        "attention.temperature_scale": None if growth is None else growth.beta,
        LOG_MULTIPLIER: share,  # the share itself, where DeepSeek's files have a tenth of it
    }


def _ministral_refusal(spec: ModelSpec) -> str | None:
    mixer = attention(spec)
    if mixer.rope is None or mixer.rope.kind != "yarn":
        return "its rotary embedding is not YaRN"
    growth = mixer.long_query
    plain = growth is None or (growth.length == mixer.rope.original_length and growth.offset == 0)
    return None if plain else "queries that grow from another length than the original context"


def _ministral_read(metadata: Metadata) -> dict[str, Any]:
    block = rope_block(metadata, {}, integer(metadata, "rope.dimension_count"))
    share = metadata.get(LOG_MULTIPLIER)
    block |= {} if share is None else {"mscale": share, "mscale_all_dim": share}
    return {"rope_parameters": block | {"llama_4_scaling_beta": metadata.get("attention.temperature_scale", 0.0)}}


WINDOWED: dict[str, Architecture] = {
    "gpt_oss": Architecture(
        "gpt-oss",
        "GptOssForCausalLM",
        head="own",
        windows=True,
        biases=QKV | {"attn/o", "mlp/router", *(f"mlp/experts/{name}" for name in ("gate", "up", "down"))},
        names={"mlp_norm": "post_attention_norm"},
        normalized=True,
        rounded_yarn=True,
        refusal=_oss_refusal,
        write=lambda spec: {WINDOW: window(spec)},
        read=_oss_read,
        rope=_oss_rope,
        without=("num_experts",),
    ),
    "exaone4": Architecture(
        "exaone4",
        "Exaone4ForCausalLM",
        windows=True,
        refusal=_exaone4_refusal,
        write=_exaone4_write,
        read=_exaone4_read,
    ),
    "exaone_moe": Architecture(
        "exaone-moe",
        "ExaoneMoeForCausalLM",
        head="own",
        windows=True,
        routed=True,
        refusal=lambda spec: _shared(spec) or _local(spec),
        write=_exaone_moe_write,
        read=_exaone_moe_read,
    ),
    "afmoe": Architecture(
        "afmoe",
        "AfmoeForCausalLM",
        windows=True,
        routed=True,
        refusal=_afmoe_refusal,
        write=lambda spec: {WINDOW: window(spec)},
        read=_afmoe_read,
    ),
    "hunyuan_v1_moe": Architecture(
        "hunyuan-moe",
        "HunYuanMoEV1ForCausalLM",
        normalized=True,
        refusal=_shared,
        write=_hunyuan_write,
        read=_hunyuan_read,
        without=("num_experts_per_tok",),
    ),
    "ernie4_5_moe": Architecture(
        "ernie4_5-moe",
        "Ernie4_5_MoeForCausalLM",
        routed=True,
        refusal=_ernie_refusal,
        write=_ernie_write,
        read=_ernie_read,
        without=("num_experts", "num_experts_per_tok"),
    ),
    "ministral3": Architecture(
        "mistral3",
        "Ministral3ForCausalLM",
        permuted=True,
        latent=True,
        refusal=_ministral_refusal,
        write=_ministral_write,
        read=_ministral_read,
    ),
    "llama4_text": Architecture(
        "llama4",
        "Llama4ForCausalLM",
        normalized=False,
        own_routing=True,
        refusal=_llama4_refusal,
        write=lambda spec: {"interleave_moe_layer_step": _step(spec)},
        read=_llama4_read,
        without=("num_experts", "sliding_window"),
    ),
}
