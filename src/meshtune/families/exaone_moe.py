"""K-EXAONE: EXAONE 4's attention behind norms, DeepSeek V3's router and shared expert."""

from __future__ import annotations

from typing import Any

from meshtune.families import qwen3
from meshtune.families.config_fields import ConfigFields
from meshtune.families.exaone4 import WINDOW, exaone_attention
from meshtune.families.experts import CORRECTION, are_sparse, expert_modules, shared_modules, sigmoid_experts
from meshtune.families.family import Family
from meshtune.families.llama import MODULES, OUTSIDE, decoder_spec, mlp_spec
from meshtune.families.tensors import Stored, TensorMap, View, one_to_one
from meshtune.model.layer import LayerSpec
from meshtune.model.norm import NormSpec
from meshtune.model.spec import ModelSpec

DEFAULTS = WINDOW | {
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "num_experts": 64,
    "num_experts_per_tok": 8,
}

DESCRIPTIONS = {
    "exaone_moe": Family(
        title="K-EXAONE",
        special="windows and a rotary embedding in three of four layers, neither in others; 128 experts, of which 8 "
        "compute a token, and a shared one; sigmoid router with a correction",
        models=("LGAI-EXAONE/K-EXAONE-236B-A23B",),
        group="mixture of experts",
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """ExaoneMoeConfig -> ModelSpec. The layers that predict further tokens, which files may hold, are not used."""
    fields = ConfigFields(DEFAULTS | config, where)
    norm = NormSpec(fields.number("rms_norm_eps", 1e-5))
    sparse = are_sparse(fields)
    fields.only("is_moe_layer", None, sparse)  # an older form of mlp_layer_types
    experts, dense = sigmoid_experts(fields, shared="num_shared_experts"), mlp_spec(fields)
    layers = [
        LayerSpec(attention, experts if is_sparse else dense, norm)
        for attention, is_sparse in zip(exaone_attention(fields, norm), sparse, strict=True)
    ]
    return decoder_spec(fields, "exaone_moe", ("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"), layers)


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors; routed experts by themselves or fused."""
    in_files = {"mlp/router/correction": Stored("mlp.e_score_correction_bias", "mlp.gate", View.identity)}
    correction = CORRECTION if spec.fused_experts else in_files
    mixture = {**expert_modules(spec), **shared_modules("shared_experts"), **correction}
    return one_to_one(spec, {**MODULES, **qwen3.NORMS, **mixture}, OUTSIDE)
