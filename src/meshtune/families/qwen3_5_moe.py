"""Qwen3.5's mixtures of experts: Qwen3.5's layers, each with routed experts and a gated shared one."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshtune.families import qwen3, qwen3_5
from meshtune.families.config_fields import ConfigFields
from meshtune.families.experts import expert_modules, experts_spec
from meshtune.families.family import OVERFLOWS_IN_UNSLOTH, Family
from meshtune.families.llama import MODULES, OUTSIDE, decoder_spec
from meshtune.families.qwen2_moe import SHARED
from meshtune.families.recurrent import LIMITS
from meshtune.families.tensors import TensorMap, one_to_one
from meshtune.model.mlp import MlpSpec
from meshtune.model.spec import ModelSpec

# Qwen3_5MoeTextConfig's, beside those that it shares with Qwen3.5.
DEFAULTS = {
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
# Of Qwen3-Next's config, which transformers 5 does not read for this family.
UNUSED = ("intermediate_size", "decoder_sparse_step", "norm_topk_prob", "mlp_only_layers")

DESCRIPTIONS = {
    "qwen3_5_moe_text": Family(
        title="Qwen3.5 and 3.6 MoE",
        special="Qwen3.5's gated delta nets and gated attention; 256 experts, of which 8 compute a token, and a gated "
        "shared one",
        models=("Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen3.5-122B-A10B", "Qwen/Qwen3.5-397B-A17B"),
        overflow=OVERFLOWS_IN_UNSLOTH,
        group="hybrid",
        template="chatml",
        limits=LIMITS,
        mixture=True,
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """Qwen3_5MoeTextConfig -> ModelSpec."""
    fields = ConfigFields(qwen3_5.DEFAULTS | DEFAULTS | config, where)
    for unused in (*qwen3_5.UNUSED, *UNUSED):
        fields.get(unused)
    experts = experts_spec(fields, router={"normalize": True})
    shared = MlpSpec(fields.integer("shared_expert_intermediate_size"), experts.activation)
    experts = dataclasses.replace(experts, shared=shared, shared_gate=True)
    layers = qwen3_5.hybrid_layers(fields, [experts] * fields.integer("num_hidden_layers"))
    return decoder_spec(fields, "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", layers)


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors; routed experts by themselves or fused."""
    mixers = qwen3.NORMS | qwen3_5.DELTA_MODULES | qwen3_5.IN_MODULES
    table = one_to_one(spec, {**MODULES, **mixers, **SHARED, **expert_modules(spec)}, OUTSIDE)
    return qwen3_5.with_key_heads(table, spec)
