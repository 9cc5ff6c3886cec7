"""Granite 4 with Mamba-2 layers, with experts or without: state-space mixers and attention between
Granite's multipliers."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshtune.families.config_fields import ConfigFields, read_rope
from meshtune.families.experts import experts_spec
from meshtune.families.family import Family
from meshtune.families.granitemoe import SHARED, routed_modules
from meshtune.families.llama import MODULES as LLAMA
from meshtune.families.llama import OUTSIDE, attention_spec, decoder_spec, head_sizes, norm_spec
from meshtune.families.packed import with_gate_up_in_halves
from meshtune.families.recurrent import LIMITS, bounds, layer_kinds, with_mamba_groups
from meshtune.families.tensors import TensorMap, one_to_one
from meshtune.model.block import FeedForward
from meshtune.model.layer import LayerSpec
from meshtune.model.mamba2 import Mamba2Spec
from meshtune.model.mlp import MlpSpec
from meshtune.model.spec import ModelSpec

# GraniteMoeHybridConfig's.
DEFAULTS = {
    "max_position_embeddings": 2048,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 14336,
    "mamba_n_heads": 128,
    "mamba_d_state": 256,
}
MODULES = LLAMA | {
    "mamba_norm": "input_layernorm",
    "mamba": "mamba",
    "mamba/in": "mamba.in_proj",
    "mamba/filter": "mamba.conv1d",
    "mamba/norm": "mamba.norm",
    "mamba/out": "mamba.out_proj",
    **SHARED,
    "mlp/gate_up": "shared_mlp.input_linear",
    "mlp/down": "shared_mlp.output_linear",
}
# Fields that say how the model was initialised, how transformers computes it, or what experts are like where there are
# none.
UNUSED = """
    init_method normalization_function mamba_chunk_size intermediate_size num_experts_per_tok output_router_logits
    router_aux_loss_coef rope_theta rope_scaling rope_parameters
""".split()

DESCRIPTIONS = {
    "granitemoehybrid": Family(
        title="Granite 4 H",
        special="Mamba-2 layers, attention without positions in some; multipliers of embeddings, residuals, scores and "
        "logits; in Tiny and Small 64 or 72 experts, of which 6 or 10 compute a token, beside a shared one",
        models=("ibm-granite/granite-4.0-h-1b", "ibm-granite/granite-4.0-h-350m", "ibm-granite/granite-4.0-h-tiny"),
        group="hybrid",
        limits=LIMITS,
        mixture=True,
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """GraniteMoeHybridConfig -> ModelSpec."""
    fields = ConfigFields(DEFAULTS | config, where)
    for unused in UNUSED:
        fields.get(unused)
    fields.only("hidden_act", "silu")
    bias, norm = bool(fields.get("attention_bias", False)), norm_spec(fields)
    rope = None
    if fields.get("position_embedding_type") == "rope":
        rope = read_rope(fields, head_sizes(fields)[2], theta=10_000.0)
    else:
        fields.only("position_embedding_type", None, "nope")
    attention = attention_spec(
        fields, rope=rope, scale=fields.number("attention_multiplier", 1.0), qkv_bias=bias, out_bias=bias
    )
    mlp: FeedForward = MlpSpec(fields.integer("shared_intermediate_size", 1024), packed=True)
    if fields.get("num_local_experts"):
        experts = experts_spec(fields, width="intermediate_size", router={"normalize": True})
        mlp = dataclasses.replace(experts, shared=mlp)
    scale = fields.number("residual_multiplier", 1.0)
    mixers = {"linear_attention": _mamba(fields), "full_attention": attention}
    layers = {kind: LayerSpec(mixer, mlp, norm, scale=scale) for kind, mixer in mixers.items()}
    return decoder_spec(
        fields,
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        [layers[kind] for kind in layer_kinds(fields, tuple(layers), "linear_attention")],
        embed_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=1 / fields.number("logits_scaling", 1.0),
    )


def _mamba(fields: ConfigFields) -> Mamba2Spec:
    heads, inner = fields.integer("mamba_n_heads"), fields.integer("mamba_expand", 2) * fields.integer("hidden_size")
    head_dim = inner // heads if fields.get("mamba_d_head", "auto") == "auto" else fields.integer("mamba_d_head")
    if heads * head_dim != inner:
        raise fields.error("mamba_n_heads", f"{heads} heads of {head_dim} numbers are not the {inner} of the mixer")
    bias = bool(fields.get("mamba_proj_bias", False))
    return Mamba2Spec(
        heads,
        head_dim,
        fields.integer("mamba_d_state"),
        fields.integer("mamba_n_groups", 1),
        fields.integer("mamba_d_conv", 4),
        norm_spec(fields),
        filter_bias=bool(fields.get("mamba_conv_bias", True)),
        in_bias=bias,
        out_bias=bias,
        dt_limit=bounds(fields, "time_step_limit"),
    )


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors: each is one leaf, or one layer of it, with the rows of fused projections in groups."""
    table = one_to_one(spec, {**MODULES, **routed_modules(spec)}, OUTSIDE)
    return with_gate_up_in_halves(with_gate_up_in_halves(with_mamba_groups(table, spec)), "mlp/shared/gate_up")
