"""ERNIE 4.5 with a mixture of experts: pairs of neighbours are rotated, experts are chosen by corrected scores."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshtune.families.config_fields import ConfigFields, read_rope
from meshtune.families.experts import expert_modules, experts_spec, shared_modules, with_shared
from meshtune.families.family import Family
from meshtune.families.llama import MODULES, OUTSIDE, attention_spec, decoder_spec, head_sizes, mlp_spec
from meshtune.families.tensors import Shape, Stored, TensorMap, View, one_to_one
from meshtune.model.layer import LayerSpec
from meshtune.model.norm import NormSpec
from meshtune.model.spec import ModelSpec

# Ernie4_5_MoeConfig's, where they are not those of the other families.
DEFAULTS = {"num_key_value_heads": 4, "tie_word_embeddings": True}
ARCHITECTURES = ("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoEForCausalLM")

DESCRIPTIONS = {
    "ernie4_5_moe": Family(
        title="ERNIE 4.5 (mixture of experts)",
        special="pairs of neighbours are rotated, softmax router with a correction that balances load, shared experts",
        models=("baidu/ERNIE-4.5-21B-A3B-PT", "baidu/ERNIE-4.5-300B-A47B-PT"),
        group="mixture of experts",
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """Ernie4_5_MoeConfig -> ModelSpec, with transformers' defaults for fields that are absent."""
    fields = ConfigFields(DEFAULTS | config, where)
    fields.harmless("auto_map", "moe_capacity", "moe_gate", "num_nextn_predict_layers")
    fields.only("moe_use_aux_free", True)
    bias = bool(fields.get("use_bias", False))
    if bias and fields.get("tie_word_embeddings"):
        raise fields.error("tie_word_embeddings", "a head with a bias that is tied to the embedding is not implemented")
    rope = read_rope(fields, head_sizes(fields)[2], theta=500_000.0, interleaved=True)
    attention = attention_spec(fields, rope=rope, qkv_bias=bias, out_bias=bias)
    least = fields.number("moe_norm_min", 1e-12)
    router = {"normalize": True, "epsilon": least, "clamp_sum": True, "correction": True, "float32": True}
    experts = experts_spec(fields, top_k="moe_k", router=router)
    if shared := fields.get("moe_num_shared_experts", 2):
        experts = with_shared(experts, shared, bias=bias)
    dense = LayerSpec(attention, mlp_spec(fields, bias=bias), NormSpec(fields.number("rms_norm_eps", 1e-5)))
    sparse = dataclasses.replace(dense, ffn=experts)
    layers = [sparse if is_sparse else dense for is_sparse in _sparse(fields)]
    return decoder_spec(fields, "ernie4_5_moe", ARCHITECTURES, layers, head_bias=bias)


def _sparse(fields: ConfigFields) -> list[bool]:
    """Which layers have experts: every moe_layer_interval-th from moe_layer_start_index to moe_layer_end_index."""
    count, interval = fields.integer("num_hidden_layers"), fields.integer("moe_layer_interval", 1)
    first, last = fields.get("moe_layer_start_index", 1), fields.get("moe_layer_end_index", -1)
    last = count - 1 if last == -1 else last
    return [(index + 1) % interval == 0 and first <= index <= last for index in range(count)]


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors; routed experts by themselves or fused."""
    correction = Stored("mlp.moe_statics.e_score_correction_bias", "mlp.gate", _row)
    mixture = {**expert_modules(spec), **shared_modules("shared_experts"), "mlp/router/correction": correction}
    return one_to_one(spec, {**MODULES, **mixture}, OUTSIDE)


def _row(shape: Shape) -> View:
    """A tensor [1, E] as [E]."""
    return View.identity((1, *shape)).merge(*shape)
