"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with routed experts and a gated shared one (https://arxiv.org/abs/2407.10671)."""

from __future__ import annotations

import dataclasses

from meshtune.families.config_fields import ConfigFields
from meshtune.families.experts import expert_modules, experts_spec, shared_modules, sparse_layers
from meshtune.families.family import Family
from meshtune.families.llama import MODULES, OUTSIDE, attention_spec, decoder_spec
from meshtune.families.qwen2 import windowed_layers
from meshtune.families.tensors import TensorMap, one_to_one
from meshtune.model.mlp import MlpSpec
from meshtune.model.spec import ModelSpec

SHARED = shared_modules("shared_expert") | {"mlp/shared_gate": "mlp.shared_expert_gate"}

DESCRIPTIONS = {
    "qwen2_moe": Family(
        title="Qwen1.5 MoE and Qwen2 MoE",
        special="60 experts, of which 4 compute a token, and a gated shared one",
        models=("Qwen/Qwen1.5-MoE-A2.7B-Chat", "Qwen/Qwen2-57B-A14B-Instruct"),
        group="mixture of experts",
        template="chatml",
    )
}


def model_spec(config: dict[str, object], where: str) -> ModelSpec:
    """Qwen2MoeConfig -> ModelSpec."""
    fields = ConfigFields(config, where)
    attention = attention_spec(fields, qkv_bias=bool(fields.get("qkv_bias", True)))
    experts = experts_spec(fields, router={"normalize": bool(fields.get("norm_topk_prob", False))})
    shared = MlpSpec(fields.integer("shared_expert_intermediate_size"), experts.activation)
    experts = dataclasses.replace(experts, shared=shared, shared_gate=True)
    dense = windowed_layers(fields, attention)
    kinds = sparse_layers(fields, dataclasses.replace(dense[0], ffn=experts), dense[0])
    layers = [dataclasses.replace(layer, ffn=kind.ffn) for layer, kind in zip(dense, kinds, strict=True)]
    return decoder_spec(fields, "qwen2_moe", "Qwen2MoeForCausalLM", layers)


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors; routed experts by themselves or fused."""
    return one_to_one(spec, {**MODULES, **SHARED, **expert_modules(spec)}, OUTSIDE)
