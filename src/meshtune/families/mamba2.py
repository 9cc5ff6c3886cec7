"""Mamba-2: layers of one state-space mixer each, without feed-forward networks (https://arxiv.org/abs/2405.21060)."""

from __future__ import annotations

from typing import Any

from meshtune.families.config_fields import ConfigFields
from meshtune.families.family import Family
from meshtune.families.llama import decoder_spec
from meshtune.families.recurrent import LIMITS, bounds, rename_modules, with_mamba_groups
from meshtune.families.tensors import TensorMap, one_to_one
from meshtune.model.layer import LayerSpec
from meshtune.model.mamba2 import Mamba2Spec
from meshtune.model.norm import NormSpec
from meshtune.model.spec import ModelSpec

# Mamba2Config's. It has no context length, and a state takes any number of tokens.
DEFAULTS = {"num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8, "max_position_embeddings": 2**20}
MODULES = {
    "mamba_norm": "norm",
    "mamba": "mixer",
    "mamba/in": "mixer.in_proj",
    "mamba/filter": "mixer.conv1d",
    "mamba/norm": "mixer.norm",
    "mamba/out": "mixer.out_proj",
}
OUTSIDE = {"embed": "model.embeddings", "norm": "model.norm_f", "head": "lm_head", "score": "score"}
# Fields that say how the model was initialised, or how transformers computes it.
UNUSED = """
    chunk_size intermediate_size norm_before_gate rms_norm rescale_prenorm_residual residual_in_fp32
    time_step_floor time_step_max time_step_min time_step_rank layer_types
""".split()

DESCRIPTIONS = {
    "mamba2": Family(
        title="Mamba-2",
        special="a state-space mixer in every layer, no attention and no feed-forward networks; no adapters on the "
        "mixer's output, which peft refuses",
        models=("mistralai/Mamba-Codestral-7B-v0.1",),
        group="hybrid",
        limits=LIMITS,
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """Mamba2Config -> ModelSpec."""
    fields = ConfigFields(DEFAULTS | config, where)
    for unused in UNUSED:
        fields.get(unused)
    norm = NormSpec(fields.number("layer_norm_epsilon", 1e-5))
    heads, head_dim = fields.integer("num_heads"), fields.integer("head_dim")
    if heads * head_dim != fields.integer("expand", 2) * fields.integer("hidden_size"):
        raise fields.error("num_heads", f"{heads} heads of {head_dim} numbers are not expand x hidden_size")
    fields.only("hidden_act", "silu")
    bias = bool(fields.get("use_bias", False))
    mixer = Mamba2Spec(
        heads,
        head_dim,
        fields.integer("state_size"),
        fields.integer("n_groups"),
        fields.integer("conv_kernel", 4),
        norm,
        filter_bias=bool(fields.get("use_conv_bias", True)),
        in_bias=bias,
        out_bias=bias,
        dt_limit=bounds(fields, "time_step_limit"),
    )
    layers = [LayerSpec(mixer, None, norm)] * fields.integer("num_hidden_layers")
    return decoder_spec(fields, "mamba2", "Mamba2ForCausalLM", layers)


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors: each is one leaf, or one layer of it, with the rows of fused projections in groups."""
    return rename_modules(with_mamba_groups(one_to_one(spec, MODULES, OUTSIDE), spec), "backbone.", modules=True)
