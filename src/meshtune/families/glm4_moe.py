<<<<<<< HEAD
"""GLM-4.5, 4.6 and 4.7: rotary embeddings of half a head, DeepSeek V3's router and shared expert
(https://arxiv.org/abs/2508.06471)."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshtune.families import qwen3
from meshtune.families.config_fields import ConfigFields
from meshtune.families.deepseek import CORRECTION, SHARED, are_sparse, experts_of
from meshtune.families.experts import expert_modules
from meshtune.families.family import Family
from meshtune.families.llama import MODULES, OUTSIDE, attention_spec, decoder_spec, head_sizes, mlp_spec, norm_spec
=======
"""GLM-4.5, 4.6 and 4.7: partial rotation, experts as in DeepSeek V3 (https://arxiv.org/abs/2508.06471)."""

from __future__ import annotations

from typing import Any

from meshtune.families.config_fields import ConfigFields
from meshtune.families.deepseek_experts import (
    CORRECTION,
    SHARED,
    dense_then_sparse,
    sigmoid_router,
    with_shared_experts,
)
from meshtune.families.experts import expert_modules, experts_spec
from meshtune.families.family import Family
from meshtune.families.llama import MODULES, OUTSIDE, attention_spec, decoder_spec, head_sizes, mlp_spec, norm_spec
from meshtune.families.qwen3 import NORMS
>>>>>>> 9a142e9 (OLMoE, GLM-4.5, dots.llm1, MiniMax-M2 and gpt-oss)
from meshtune.families.rope_fields import read_rope
from meshtune.families.tensors import TensorMap, one_to_one
from meshtune.model.layer import LayerSpec
from meshtune.model.spec import ModelSpec

<<<<<<< HEAD
DEFAULTS = {"routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5}

DESCRIPTIONS = {
    "glm4_moe": Family(
        title="GLM-4.5, 4.6 and 4.7",
        special="half of every head is rotated, sigmoid router with a correction, a shared expert",
=======
DESCRIPTIONS = {
    "glm4_moe": Family(
        title="GLM-4.5, 4.6, 4.7",
        special="half of each head is rotated, sigmoid router with a correction that balances load, a shared expert",
>>>>>>> 9a142e9 (OLMoE, GLM-4.5, dots.llm1, MiniMax-M2 and gpt-oss)
        models=("zai-org/GLM-4.5-Air", "zai-org/GLM-4.6"),
        group="mixture of experts",
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
<<<<<<< HEAD
    """Glm4MoeConfig -> ModelSpec. The layer that predicts further tokens, which files may hold, is not used."""
    fields = ConfigFields(DEFAULTS | config, where)
    for unused in ("num_mtp_layers", "num_nextn_predict_layers"):
        fields.get(unused)
    attention = attention_spec(
        fields,
        rope=read_rope(fields, head_sizes(fields)[2], theta=10000.0, rotated=0.5),
        qkv_bias=bool(fields.get("attention_bias", False)),
        qk_norm=norm_spec(fields) if fields.get("use_qk_norm", False) else None,
    )
    dense = LayerSpec(attention, mlp_spec(fields), norm_spec(fields))
    sparse = dataclasses.replace(dense, ffn=experts_of(fields, softmax=False))
    layers = [sparse if is_sparse else dense for is_sparse in are_sparse(fields)]
=======
    """Glm4MoeConfig -> ModelSpec, with transformers' defaults for fields that are absent."""
    fields = ConfigFields({"rms_norm_eps": 1e-5, "first_k_dense_replace": 1} | config, where)
    for unused in ("num_nextn_predict_layers", "num_mtp_layers"):
        fields.get(unused)
    rope = read_rope(fields, head_sizes(fields)[2], theta=10000.0, rotated=0.5)
    qk_norm = norm_spec(fields) if fields.get("use_qk_norm", False) else None
    attention = attention_spec(fields, rope=rope, qkv_bias=bool(fields.get("attention_bias", False)), qk_norm=qk_norm)
    experts = with_shared_experts(fields, experts_spec(fields, router=sigmoid_router(fields)))
    layers = dense_then_sparse(fields, LayerSpec(attention, mlp_spec(fields), norm_spec(fields)), experts)
>>>>>>> 9a142e9 (OLMoE, GLM-4.5, dots.llm1, MiniMax-M2 and gpt-oss)
    return decoder_spec(fields, "glm4_moe", "Glm4MoeForCausalLM", layers)


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors; routed experts by themselves or fused."""
<<<<<<< HEAD
    return one_to_one(spec, {**MODULES, **qwen3.NORMS, **SHARED, **CORRECTION, **expert_modules(spec)}, OUTSIDE)
=======
    return one_to_one(spec, {**MODULES, **NORMS, **SHARED, **CORRECTION, **expert_modules(spec)}, OUTSIDE)
>>>>>>> 9a142e9 (OLMoE, GLM-4.5, dots.llm1, MiniMax-M2 and gpt-oss)
