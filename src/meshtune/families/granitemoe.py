"""Granite 3 with a mixture of experts, with a shared expert or without: Granite's multipliers, fused experts."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshtune.families.config_fields import ConfigFields, read_rope
from meshtune.families.experts import experts_spec, fused_modules
from meshtune.families.family import Family
from meshtune.families.llama import MODULES, OUTSIDE, attention_spec, decoder_spec, head_sizes, norm_spec
from meshtune.families.packed import with_gate_up_in_halves
from meshtune.families.tensors import TensorMap, one_to_one
from meshtune.model.layer import LayerSpec
from meshtune.model.mlp import MlpSpec
from meshtune.model.spec import ModelSpec

BLOCK = "block_sparse_moe"
FILES = {"gate_up_proj": f"{BLOCK}.input_linear.weight", "down_proj": f"{BLOCK}.output_linear.weight"}
SHARED = {"mlp/shared/gate_up": "shared_mlp.input_linear", "mlp/shared/down": "shared_mlp.output_linear"}
ARCHITECTURES = {"granitemoe": "GraniteMoeForCausalLM", "granitemoeshared": "GraniteMoeSharedForCausalLM"}
# The configs' classes', where they are not those of the other families.
DEFAULTS = {"num_local_experts": 8, "num_experts_per_tok": 2}

DESCRIPTIONS = {
    "granitemoe": Family(
        title="Granite 3 MoE",
        special="32 or 40 experts, of which 8 compute a token; multipliers on embeddings, scores, residual sums and "
        "logits",
        models=("ibm-granite/granite-3.1-3b-a800m-instruct", "ibm-granite/granite-3.1-1b-a400m-instruct"),
        group="mixture of experts",
    ),
    "granitemoeshared": Family(
        title="Granite MoE with a shared expert",
        special="as Granite 3 MoE, with a shared expert",
        models=("ibm-research/moe-7b-1b-active-shared-experts",),
        group="mixture of experts",
    ),
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """GraniteMoeConfig or GraniteMoeSharedConfig -> ModelSpec. A multiplier that is absent is 1."""
    kind = config["model_type"]
    fields = ConfigFields(DEFAULTS | config, where)
    bias = bool(fields.get("attention_bias", False))
    attention = attention_spec(
        fields,
        rope=read_rope(fields, head_sizes(fields)[2], theta=10000.0),
        scale=fields.number("attention_multiplier", 1.0),
        qkv_bias=bias,
        out_bias=bias,
    )
    experts = experts_spec(fields, width="intermediate_size", router={"normalize": True})
    if kind == "granitemoeshared" and (width := fields.get("shared_intermediate_size", 0)):
        experts = dataclasses.replace(experts, shared=MlpSpec(width, experts.activation, packed=True))
    layer = LayerSpec(attention, experts, norm_spec(fields), scale=fields.number("residual_multiplier", 1.0))
    return decoder_spec(
        fields,
        kind,
        ARCHITECTURES[kind],
        [layer] * fields.integer("num_hidden_layers"),
        embed_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=1 / fields.number("logits_scaling", 1.0),
    )


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors, with the names that experts have in files, or in transformers' memory (`fused_experts`)."""
    table = one_to_one(spec, {**MODULES, **SHARED, **routed_modules(spec)}, OUTSIDE)
    return with_gate_up_in_halves(table, "mlp/shared/gate_up")


def routed_modules(spec: ModelSpec) -> dict[str, Any]:
    """The router and the experts."""
    if spec.fused_experts:
        return {"mlp/router": f"{BLOCK}.router", **fused_modules(f"{BLOCK}.experts")}
    return {"mlp/router": f"{BLOCK}.router.layer", **fused_modules(f"{BLOCK}.experts", FILES)}
