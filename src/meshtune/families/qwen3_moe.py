"""Qwen3 with a mixture of experts: Qwen3 Coder, 30B-A3B, 235B-A22B (https://arxiv.org/abs/2505.09388)."""

from __future__ import annotations

import dataclasses

from meshtune.families.config_fields import ConfigFields
from meshtune.families.experts import column_half, expert_modules, experts_spec, sparse_layers, transpose_experts
from meshtune.families.family import OVERFLOWS_IN_UNSLOTH, Family
from meshtune.families.llama import MODULES, OUTSIDE, decoder_spec, mlp_spec, norm_spec
from meshtune.families.qwen2 import mrope_attention
from meshtune.families.qwen3 import NORMS
from meshtune.families.tensors import TensorMap, one_to_one, with_view
from meshtune.model.layer import LayerSpec
from meshtune.model.spec import ModelSpec

DESCRIPTIONS = {
    "qwen3_moe": Family(
        title="Qwen3 MoE",
        special="128 experts, of which 8 compute a token",
        models=("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B", "Qwen/Qwen3-Coder-30B-A3B-Instruct"),
        overflow=OVERFLOWS_IN_UNSLOTH,
        group="mixture of experts",
        template="chatml",
    )
}


def model_spec(config: dict[str, object], where: str) -> ModelSpec:
    """Qwen3MoeConfig -> ModelSpec. A window, where one is used, is that of every layer."""
    fields = ConfigFields(config, where)
    bias = bool(fields.get("attention_bias", False))
    window = fields.get("sliding_window", 4096) if fields.get("use_sliding_window", False) else None
    switches = {"qkv_bias": bias, "out_bias": bias, "qk_norm": norm_spec(fields), "window": window}
    attention = mrope_attention(fields, "interleaved", **switches)
    fields.get("sliding_window")
    fields.get("max_window_layers")  # read by no version of transformers
    experts = experts_spec(fields, router={"normalize": bool(fields.get("norm_topk_prob", False))})
    sparse = LayerSpec(attention, experts, norm_spec(fields))
    dense = dataclasses.replace(sparse, ffn=mlp_spec(fields))
    return decoder_spec(fields, "qwen3_moe", "Qwen3MoeForCausalLM", sparse_layers(fields, sparse, dense))


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors; experts by themselves or fused, and then transposed in published files of Qwen3-VL."""
    table = one_to_one(spec, {**MODULES, **NORMS, **expert_modules(spec)}, OUTSIDE)
    if not spec.fused_experts or spec.composite is None or not spec.composite.transposed_experts:
        return table
    for part, node in enumerate(("gate", "up")):
        table = with_view(table, f"experts/{node}/weight", lambda array, part=part: column_half(array.shape[1:], part))
    return with_view(table, "experts/down/weight", lambda array: transpose_experts(array.shape[1:]))
