"""DeepSeek's architecture in llama.cpp: latent attention, with keys and values absorbed into queries and results."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshtune.families.gguf.architecture import Architecture, Metadata, experts, integer
from meshtune.families.gguf.routing import deepseek_fields
from meshtune.model.latent_attention import LatentAttentionSpec
from meshtune.model.spec import ModelSpec

LITE = (26, 27)  # layers of models without latents of queries
NAMES = {"attn/q_norm": "attn_q_a_norm"}


def _latent(spec: ModelSpec) -> LatentAttentionSpec:
    return next(kind.mixer for kind in spec.layer_kinds if isinstance(kind.mixer, LatentAttentionSpec))


def _refusal(spec: ModelSpec) -> str | None:
    if not _latent(spec).rope.interleaved:
        return "rope_interleave is False"
    if _latent(spec).query_latent is None and spec.layers not in LITE:
        return "q_lora_rank is null: llama.cpp has such queries in models of 26 or 27 layers alone"
    block = experts(spec)
    if block is None:
        return "it has no experts"
    return "it has no shared experts" if block.shared is None else None


def _write(spec: ModelSpec) -> dict[str, Any]:
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


def _read(metadata: Metadata) -> dict[str, Any]:
    if "attention.key_length_mla" not in metadata:
        raise ValueError("its keys and values are one tensor (attn_kv_b), as converters before May 2025 wrote it")
    rotated = integer(metadata, "rope.dimension_count")
    heads = metadata["attention.head_count"]
    return {
        "num_key_value_heads": heads,
        "head_dim": rotated,
        "q_lora_rank": metadata.get("attention.q_lora_rank"),
        "kv_lora_rank": metadata["attention.kv_lora_rank"],
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": integer(metadata, "attention.key_length_mla") - rotated,
        "v_head_dim": metadata["attention.value_length_mla"],
        **deepseek_fields(metadata),
    }


def _read_v2(metadata: Metadata) -> dict[str, Any]:
    return {**_read(metadata), "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False}


V3 = Architecture(
    "deepseek2",
    "DeepseekV3ForCausalLM",
    names=NAMES,
    routed=True,
    own_scale=True,
    latent=True,
    refusal=_refusal,
    write=_write,
    read=_read,
    without=("num_experts", "sliding_window"),
)
LATENT: dict[str, Architecture] = {
    "deepseek_v3": V3,
    "deepseek_v2": dataclasses.replace(
        V3,
        class_name="DeepseekV2ForCausalLM",
        read=_read_v2,
        chosen=lambda metadata: metadata.get("expert_gating_func", 1) == 1,
    ),
    "kimi_k2": V3,
    "glm4_moe_lite": dataclasses.replace(V3, class_name="Glm4MoeLiteForCausalLM"),
}
