"""OLMoE: 64 small experts, and all queries, and all keys, normalised together (https://arxiv.org/abs/2409.02060)."""

from __future__ import annotations

from typing import Any

from meshtune.families import qwen3
from meshtune.families.config_fields import ConfigFields
from meshtune.families.experts import expert_modules, experts_spec
from meshtune.families.family import Family
from meshtune.families.llama import MODULES, OUTSIDE, attention_spec, decoder_spec, norm_spec
from meshtune.families.tensors import TensorMap, one_to_one
from meshtune.model.layer import LayerSpec
from meshtune.model.spec import ModelSpec

DESCRIPTIONS = {
    "olmoe": Family(
        title="OLMoE",
        special="64 experts, of which 8 compute a token; queries and keys normalised over all heads",
        models=("allenai/OLMoE-1B-7B-0125-Instruct", "allenai/OLMoE-1B-7B-0924"),
        group="mixture of experts",
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """OlmoeConfig -> ModelSpec."""
    fields = ConfigFields({"rms_norm_eps": 1e-5} | config, where)
    bias, clip = bool(fields.get("attention_bias", False)), fields.get("clip_qkv")
    norm = norm_spec(fields)
    attention = attention_spec(
        fields,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=norm,
        qk_norm_over="vector",
        clip=None if clip is None else fields.number("clip_qkv"),
    )
    router = {"normalize": bool(fields.get("norm_topk_prob", False))}
    layer = LayerSpec(attention, experts_spec(fields, width="intermediate_size", router=router), norm)
    return decoder_spec(fields, "olmoe", "OlmoeForCausalLM", [layer] * fields.integer("num_hidden_layers"))


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors; experts by themselves or fused."""
    return one_to_one(spec, {**MODULES, **qwen3.NORMS, **expert_modules(spec)}, OUTSIDE)
