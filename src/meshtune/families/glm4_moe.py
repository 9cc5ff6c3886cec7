"""GLM-4.5, 4.6 and 4.7: rotary embeddings of half a head, DeepSeek V3's router and shared expert
(https://arxiv.org/abs/2508.06471)."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshtune.families import qwen3
from meshtune.families.config_fields import ConfigFields, read_rope
from meshtune.families.experts import CORRECTION, are_sparse, expert_modules, shared_modules, sigmoid_experts
from meshtune.families.family import OVERFLOWS_IN_UNSLOTH, Family
from meshtune.families.llama import MODULES, OUTSIDE, attention_spec, decoder_spec, head_sizes, mlp_spec, norm_spec
from meshtune.families.tensors import TensorMap, one_to_one
from meshtune.model.layer import LayerSpec
from meshtune.model.spec import ModelSpec

DEFAULTS = {"routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5}

DESCRIPTIONS = {
    "glm4_moe": Family(
        title="GLM-4.5, 4.6 and 4.7",
        special="half of every head is rotated, sigmoid router with a correction, a shared expert",
        models=("zai-org/GLM-4.5-Air", "zai-org/GLM-4.6"),
        overflow=OVERFLOWS_IN_UNSLOTH,
        group="mixture of experts",
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """Glm4MoeConfig -> ModelSpec. The layer that predicts further tokens, which files may hold, is not used."""
    fields = ConfigFields(DEFAULTS | config, where)
    for unused in ("num_mtp_layers", "num_nextn_predict_layers"):
        fields.get(unused)
    fields.only("moe_router_dtype", "float32")
    fields.only("decoder_sparse_step", 1)
    attention = attention_spec(
        fields,
        rope=read_rope(fields, head_sizes(fields)[2], theta=10000.0, rotated=0.5, mrope="blocks"),
        qkv_bias=bool(fields.get("attention_bias", False)),
        qk_norm=norm_spec(fields) if fields.get("use_qk_norm", False) else None,
    )
    dense = LayerSpec(attention, mlp_spec(fields), norm_spec(fields))
    sparse = dataclasses.replace(dense, ffn=sigmoid_experts(fields))
    layers = [sparse if is_sparse else dense for is_sparse in are_sparse(fields)]
    return decoder_spec(fields, "glm4_moe", "Glm4MoeForCausalLM", layers)


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors; routed experts by themselves or fused."""
    mixture = {**expert_modules(spec), **shared_modules("shared_experts"), **CORRECTION}
    return one_to_one(spec, {**MODULES, **qwen3.NORMS, **mixture}, OUTSIDE)
