"""The model types that are written as GGUF and read from it, by llama.cpp's architecture.

They are those that people deploy to llama.cpp. Others go by llama.cpp's own converter, from a folder that
`meshtune export` writes: each type here follows what llama.cpp has as constants, and has to be tested against it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from meshtune.families.gguf.architecture import (
    ALL_BIASES,
    QKV,
    SHARED_WIDTH,
    WINDOW,
    Architecture,
    Metadata,
    attention,
    by_layer,
    experts,
    first_window,
    integer,
    routed_layers,
    shared_width,
    windows_refusal,
)
from meshtune.families.gguf.gemma import GEMMA
from meshtune.families.gguf.recurrent import RECURRENT
from meshtune.families.gguf.rope import LOG_MULTIPLIER, rope_block
from meshtune.model.attention import AttentionSpec
from meshtune.model.latent_attention import LatentAttentionSpec
from meshtune.model.spec import ModelSpec

LLAMA4_CHUNK, LLAMA4_BETA, LLAMA4_LENGTH = 8192, 0.1, 8192  # which llama.cpp has as constants
LLAMA4_PLAIN = 128  # experts of the model whose queries and keys are not normalised
OSS_LIMIT = 7.0  # of the activation of gpt-oss, which llama.cpp has as a constant
LITE = (26, 27)  # layers of DeepSeek's models without latents of queries


def _qwen2_moe_read(metadata: Metadata) -> dict[str, Any]:
    return {
        "moe_intermediate_size": metadata["expert_feed_forward_length"],
        "shared_expert_intermediate_size": metadata[SHARED_WIDTH],
        "norm_topk_prob": False,
    }


def _qwen3_moe_read(metadata: Metadata) -> dict[str, Any]:
    return {"moe_intermediate_size": metadata["expert_feed_forward_length"], "norm_topk_prob": True}


def _granite_write(spec: ModelSpec) -> dict[str, Any]:
    return {
        "attention.scale": attention(spec).scale,
        "embedding_scale": spec.embed_scale,
        "residual_scale": spec.layer_kinds[0].scale,
        "logit_scale": 1 / (spec.logit_scale or 1.0),
    }


def _granite_read(metadata: Metadata) -> dict[str, Any]:
    names = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return {field: metadata.get(key, 1.0) for field, key in names.items()}


def _granite_experts_read(metadata: Metadata) -> dict[str, Any]:
    shared = {"shared_intermediate_size": metadata[SHARED_WIDTH]} if SHARED_WIDTH in metadata else {}
    return _granite_read(metadata) | {"num_local_experts": metadata["expert_count"]} | shared


def _smollm3_refusal(spec: ModelSpec) -> str | None:
    rotated = by_layer(spec, lambda layer: bool(layer.mixer and layer.mixer.ropes))
    expected = [(number + 1) % 4 != 0 for number in range(spec.layers)]
    return None if rotated == expected else "no_rope_layers other than every fourth"


def _phi_refusal(spec: ModelSpec) -> str | None:
    return None if attention(spec).qk_norm is None else "queries and keys are normalised (qk_layernorm)"


def _glm_refusal(spec: ModelSpec) -> str | None:
    mixer = attention(spec)
    same = mixer.heads * mixer.head_dim == spec.embed
    return None if same else "heads that are not together as wide as the hidden state"


def _oss_refusal(spec: ModelSpec) -> str | None:
    block = experts(spec)
    if block is None or block.clamp != OSS_LIMIT:
        return f"swiglu_limit is not {OSS_LIMIT:g}"
    return windows_refusal(spec, 2)


def _oss_read(metadata: Metadata) -> dict[str, Any]:
    block = rope_block(metadata, {}, integer(metadata, "rope.dimension_count"))
    if block["rope_type"] == "yarn":
        block["truncate"] = False  # as of the published models: files do not say it
    return {
        "num_local_experts": metadata["expert_count"],
        "intermediate_size": metadata["expert_feed_forward_length"],
        "sliding_window": metadata[WINDOW],
        "rope_parameters": block,
    }


def _ministral_write(spec: ModelSpec) -> dict[str, Any]:
    growth, rope = attention(spec).long_query, attention(spec).rope
    assert rope is not None
    return {
        "attention.temperature_scale": None if growth is None else growth.beta,
        # The share itself, where DeepSeek's files have a tenth of it.
        LOG_MULTIPLIER: dict(rope.parameters).get("mscale_all_dim"),
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


def _llama4_refusal(spec: ModelSpec) -> str | None:
    block = experts(spec)
    if block is None:
        return "it has no experts"
    normed = block.router.experts != LLAMA4_PLAIN
    for number, mixer in enumerate(by_layer(spec, lambda layer: layer.mixer)):
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
    step = _llama4_step(spec)
    interval = [(number + 1) % step == 0 for number in range(spec.layers)]
    return None if routed_layers(spec) == interval else "moe_layers of no interval"


def _llama4_step(spec: ModelSpec) -> int:
    return routed_layers(spec).index(True) + 1


def _llama4_read(metadata: Metadata) -> dict[str, Any]:
    return {
        "num_local_experts": metadata["expert_count"],
        "intermediate_size": metadata["expert_feed_forward_length"],
        "intermediate_size_mlp": metadata["feed_forward_length"],
        "interleave_moe_layer_step": metadata["interleave_moe_layer_step"],
        "use_qk_norm": metadata["expert_count"] != LLAMA4_PLAIN,
    }


def _routed_read(metadata: Metadata) -> dict[str, Any]:
    """The fields of a config that names experts as DeepSeek's do."""
    return {
        "n_routed_experts": metadata["expert_count"],
        "num_experts_per_tok": metadata["expert_used_count"],
        "moe_intermediate_size": metadata["expert_feed_forward_length"],
        "n_shared_experts": metadata.get("expert_shared_count", 0),
        "first_k_dense_replace": metadata.get("leading_dense_block_count", 0),
        "routed_scaling_factor": metadata.get("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", False)),
        "n_group": metadata.get("expert_group_count", 1),
        "topk_group": metadata.get("expert_group_used_count", 1),
    }


def _latent(spec: ModelSpec) -> LatentAttentionSpec:
    return next(kind.mixer for kind in spec.layer_kinds if isinstance(kind.mixer, LatentAttentionSpec))


def _deepseek_refusal(spec: ModelSpec) -> str | None:
    if not _latent(spec).rope.interleaved:
        return "rope_interleave is False"
    if _latent(spec).query_latent is None and spec.layers not in LITE:
        return "q_lora_rank is null: llama.cpp has such queries in models of 26 or 27 layers only"
    block = experts(spec)
    if block is None:
        return "it has no experts"
    return "it has no shared experts" if block.shared is None else None


def _deepseek_write(spec: ModelSpec) -> dict[str, Any]:
    mixer = _latent(spec)
    return {
        "attention.head_count": mixer.heads,
        "attention.head_count_kv": 1,
        "attention.key_length": mixer.latent + mixer.rope.dim,
        "attention.value_length": mixer.latent,
        "attention.key_length_mla": mixer.query_dim,
        "attention.value_length_mla": mixer.value_dim,
        "attention.kv_lora_rank": mixer.latent,
        "attention.q_lora_rank": mixer.query_latent,
    }


def _deepseek_read(metadata: Metadata) -> dict[str, Any]:
    if "attention.key_length_mla" not in metadata:
        raise ValueError("its keys and values are one tensor (attn_kv_b), as converters before May 2025 wrote it")
    rotated = integer(metadata, "rope.dimension_count")
    return {
        "num_key_value_heads": metadata["attention.head_count"],
        "head_dim": rotated,
        "q_lora_rank": metadata.get("attention.q_lora_rank"),
        "kv_lora_rank": metadata["attention.kv_lora_rank"],
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": integer(metadata, "attention.key_length_mla") - rotated,
        "v_head_dim": metadata["attention.value_length_mla"],
        **_routed_read(metadata),
    }


def _deepseek_v2_read(metadata: Metadata) -> dict[str, Any]:
    router = {"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False}
    return _deepseek_read(metadata) | router


LLAMA = Architecture("llama", "LlamaForCausalLM", permuted=True, biases=ALL_BIASES)
GRANITE = Architecture(
    "granite",
    "GraniteForCausalLM",
    permuted=True,
    own_scale=True,
    biases=ALL_BIASES,
    write=_granite_write,
    read=_granite_read,
)
GRANITE_EXPERTS = Architecture(
    "granitemoe",
    "GraniteMoeForCausalLM",
    permuted=True,
    normalized=True,
    own_scale=True,
    parted_gate_up=True,
    write=lambda spec: _granite_write(spec) | shared_width(spec),
    read=_granite_experts_read,
)
DEEPSEEK = Architecture(
    "deepseek2",
    "DeepseekV3ForCausalLM",
    routed=True,
    own_scale=True,
    latent=True,
    refusal=_deepseek_refusal,
    write=_deepseek_write,
    read=_deepseek_read,
    without=("num_experts", "sliding_window"),
)
# model_type -> architecture.
ARCHITECTURES: dict[str, Architecture] = {
    "llama": LLAMA,
    "mistral": dataclasses.replace(LLAMA, class_name="MistralForCausalLM"),
    "ministral": dataclasses.replace(LLAMA, class_name="MinistralForCausalLM"),
    "mixtral": dataclasses.replace(LLAMA, class_name="MixtralForCausalLM", normalized=True),
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
        write=lambda spec: {"interleave_moe_layer_step": _llama4_step(spec)},
        read=_llama4_read,
        without=("num_experts", "sliding_window"),
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", biases=QKV),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen2_moe": Architecture(
        "qwen2moe",
        "Qwen2MoeForCausalLM",
        head="own",
        biases=QKV,
        normalized=False,
        write=shared_width,
        read=_qwen2_moe_read,
    ),
    "qwen3_moe": Architecture("qwen3moe", "Qwen3MoeForCausalLM", normalized=True, read=_qwen3_moe_read),
    "phi": Architecture(
        "phi2",
        "PhiForCausalLM",
        refusal=_phi_refusal,
        activation="gelu_tanh",
        biases=QKV | {"attn/o", "mlp/up", "mlp/down", "head"},
        read=lambda _: {"hidden_act": "gelu_new"},
    ),
    "phi3": Architecture("phi3", "Phi3ForCausalLM"),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", permuted=True, refusal=_smollm3_refusal),
    "granite": GRANITE,
    "granitemoe": GRANITE_EXPERTS,
    "granitemoeshared": dataclasses.replace(
        GRANITE_EXPERTS, class_name="GraniteMoeSharedForCausalLM", chosen=lambda metadata: SHARED_WIDTH in metadata
    ),
    "glm": Architecture("chatglm", "GlmForCausalLM", biases=QKV, refusal=_glm_refusal),
    "glm4": Architecture("glm4", "Glm4ForCausalLM", biases=QKV),
    "glm4_moe": Architecture("glm4moe", "Glm4MoeForCausalLM", biases=QKV, routed=True, read=_routed_read),
    "gpt_oss": Architecture(
        "gpt-oss",
        "GptOssForCausalLM",
        head="own",
        windows=True,
        biases=QKV | {"attn/o", "mlp/router", *(f"mlp/experts/{name}" for name in ("gate", "up", "down"))},
        normalized=True,
        rounded_yarn=True,
        refusal=_oss_refusal,
        write=lambda spec: {WINDOW: first_window(spec)},
        read=_oss_read,
        without=("num_experts",),
    ),
    "deepseek_v3": DEEPSEEK,
    "deepseek_v2": dataclasses.replace(
        DEEPSEEK,
        class_name="DeepseekV2ForCausalLM",
        read=_deepseek_v2_read,
        chosen=lambda metadata: metadata.get("expert_gating_func", 1) == 1,
    ),
    "kimi_k2": DEEPSEEK,
    "glm4_moe_lite": dataclasses.replace(DEEPSEEK, class_name="Glm4MoeLiteForCausalLM"),
    **RECURRENT,
    **GEMMA,
}
