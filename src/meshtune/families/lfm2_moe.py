"""LFM2 with a mixture of experts: LFM2's layers, sparse but for the first few."""

from __future__ import annotations

from typing import Any

from meshtune.families.config_fields import ConfigFields
from meshtune.families.experts import expert_modules, experts_spec
from meshtune.families.family import Family
from meshtune.families.lfm2 import DEFAULTS as LFM2
from meshtune.families.lfm2 import MODULES, OUTSIDE, UNUSED, hybrid_layers, with_convolutions
from meshtune.families.llama import decoder_spec
from meshtune.families.recurrent import LIMITS
from meshtune.families.tensors import Stored, TensorMap, View, one_to_one
from meshtune.model.mlp import MlpSpec
from meshtune.model.spec import ModelSpec

BLOCK = "feed_forward"
# Lfm2MoeConfig's.
DEFAULTS = LFM2 | {
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_experts": 32,
    "num_experts_per_tok": 4,
}
CORRECTION = {"mlp/router/correction": Stored(f"{BLOCK}.expert_bias", f"{BLOCK}.gate", View.identity)}

DESCRIPTIONS = {
    "lfm2_moe": Family(
        title="LFM2 MoE",
        special="LFM2's gated short convolutions and attention; 32 experts, of which 4 compute a token, in all but the "
        "first two layers",
        models=("LiquidAI/LFM2-8B-A1B",),
        group="hybrid",
        limits=LIMITS,
        mixture=True,
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """Lfm2MoeConfig -> ModelSpec."""
    fields = ConfigFields(DEFAULTS | config, where)
    for unused in UNUSED:
        fields.get(unused)
    dense, count = fields.get("num_dense_layers", 2), fields.integer("num_hidden_layers")
    router = {
        "scoring": "sigmoid",
        "normalize": bool(fields.get("norm_topk_prob", True)),
        "epsilon": 1e-6,
        "scale": fields.number("routed_scaling_factor", 1.0),
        "correction": bool(fields.get("use_expert_bias", True)),
    }
    experts, mlp = experts_spec(fields, router=router), MlpSpec(fields.integer("intermediate_size"))
    layers = hybrid_layers(fields, [mlp if index < dense else experts for index in range(count)])
    tied = bool(fields.get("tie_embedding", fields.get("tie_word_embeddings")))
    return decoder_spec(fields, "lfm2_moe", "Lfm2MoeForCausalLM", layers, tied=tied)


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors; experts by themselves or fused."""
    names = {"gate": "w1", "up": "w3", "down": "w2"}
    experts = expert_modules(spec, block=BLOCK, names=names, memory=BLOCK)
    return with_convolutions(one_to_one(spec, {**MODULES, **experts, **CORRECTION}, OUTSIDE))
