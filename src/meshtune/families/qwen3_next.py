"""Qwen3-Next: Qwen3.5's layers with fused projections, and a mixture of experts with a gated shared one."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshtune.families import qwen3, qwen3_5
from meshtune.families.config_fields import ConfigFields
from meshtune.families.experts import expert_modules, experts_spec, sparse_layers
from meshtune.families.family import Family
from meshtune.families.llama import MODULES, OUTSIDE, decoder_spec, mlp_spec, norm_spec
from meshtune.families.qwen2_moe import SHARED
from meshtune.families.recurrent import LIMITS
from meshtune.families.tensors import TensorMap, one_to_one
from meshtune.model.layer import LayerSpec
from meshtune.model.mlp import MlpSpec
from meshtune.model.spec import ModelSpec

# Qwen3NextConfig's, beside those that it shares with Qwen3.5.
DEFAULTS = {"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "intermediate_size": 5632}

DESCRIPTIONS = {
    "qwen3_next": Family(
        title="Qwen3-Next",
        special="gated delta nets in three of four layers, gated attention in the fourth; 512 experts, of which 10 "
        "compute a token, and a gated shared one",
        models=("Qwen/Qwen3-Next-80B-A3B-Instruct",),
        group="hybrid",
        template="chatml",
        limits=LIMITS,
        mixture=True,
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """Qwen3NextConfig -> ModelSpec."""
    fields = ConfigFields(qwen3_5.DEFAULTS | DEFAULTS | config, where)
    for unused in ("max_window_layers", "sliding_window", "use_sliding_window"):
        fields.get(unused)
    experts = experts_spec(fields, router={"normalize": bool(fields.get("norm_topk_prob", True))})
    shared = MlpSpec(fields.integer("shared_expert_intermediate_size", 512), experts.activation)
    experts = dataclasses.replace(experts, shared=shared, shared_gate=True)
    sparse, dense = (LayerSpec(None, ffn, norm_spec(fields)) for ffn in (experts, mlp_spec(fields)))
    ffns = [layer.ffn for layer in sparse_layers(fields, sparse, dense) if layer.ffn is not None]
    layers = qwen3_5.hybrid_layers(fields, ffns, fused=True)
    return decoder_spec(fields, "qwen3_next", "Qwen3NextForCausalLM", layers)


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors; routed experts by themselves or fused."""
    mixers = qwen3.NORMS | qwen3_5.DELTA_MODULES | qwen3_5.IN_MODULES
    table = one_to_one(spec, {**MODULES, **mixers, **SHARED, **expert_modules(spec)}, OUTSIDE)
    return qwen3_5.with_key_heads(table, spec)
