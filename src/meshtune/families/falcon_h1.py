"""Falcon-H1: a Mamba-2 mixer and attention side by side in every layer (https://arxiv.org/abs/2507.22448)."""

from __future__ import annotations

from typing import Any

from meshtune.families.config_fields import ConfigFields, read_rope
from meshtune.families.family import Family
from meshtune.families.llama import OUTSIDE as LLAMA_OUTSIDE
from meshtune.families.llama import attention_spec, decoder_spec, head_sizes, mlp_spec, norm_spec
from meshtune.families.recurrent import LIMITS, bounds, with_mamba_groups
from meshtune.families.tensors import TensorMap, one_to_one
from meshtune.model.layer import LayerSpec
from meshtune.model.mamba2 import Mamba2Spec
from meshtune.model.parallel import Branch, ParallelSpec
from meshtune.model.spec import ModelSpec

# FalconH1Config's; published configs leave out what equals them. A mamba_d_ssm of null is expand x hidden_size.
DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "mamba_d_ssm": 1024,
    "mamba_n_heads": 128,
    "mamba_d_state": 256,
}
MODULES = {
    "parallel_norm": "input_layernorm",
    "parallel/mamba": "mamba",
    "parallel/mamba/in": "mamba.in_proj",
    "parallel/mamba/filter": "mamba.conv1d",
    "parallel/mamba/norm": "mamba.norm",
    "parallel/mamba/out": "mamba.out_proj",
    **{f"parallel/attn/{name}": f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")},
    "mlp_norm": "pre_ff_layernorm",
    **{f"mlp/{name}": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
}
OUTSIDE = LLAMA_OUTSIDE | {"norm": "model.final_layernorm"}
UNUSED = """
    attn_layer_indices layer_types layers_block_type mamba_chunk_size mamba_use_mlp mlp_expansion_factor
    num_logits_to_keep time_step_floor time_step_max time_step_min time_step_rank
""".split()

DESCRIPTIONS = {
    "falcon_h1": Family(
        title="Falcon-H1",
        special="a Mamba-2 mixer and attention side by side in every layer, multipliers of their inputs, parts and "
        "results; no adapters on the mixer's output, which peft refuses",
        models=("tiiuae/Falcon-H1-1.5B-Instruct", "tiiuae/Falcon-H1-34B-Instruct"),
        group="hybrid",
        limits=LIMITS,
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """FalconH1Config -> ModelSpec."""
    fields = ConfigFields(DEFAULTS | config, where)
    for unused in UNUSED:
        fields.get(unused)
    bias, head_dim = bool(fields.get("attention_bias", False)), head_sizes(fields)[2]
    attention = attention_spec(
        fields,
        rope=read_rope(fields, head_dim, theta=10_000.0),
        scale=head_dim**-0.5 * fields.number("key_multiplier", 1.0),
        qkv_bias=bias,
        out_bias=bias,
    )
    gate_scale, out_scale = _numbers(fields, "mlp_multipliers", 2)
    mlp = mlp_spec(fields, bias=bool(fields.get("mlp_bias", False)), gate_scale=gate_scale, out_scale=out_scale)
    mixer = ParallelSpec(
        (
            Branch(_mamba(fields), fields.number("ssm_in_multiplier", 1.0), fields.number("ssm_out_multiplier", 1.0)),
            Branch(
                attention,
                fields.number("attention_in_multiplier", 1.0),
                fields.number("attention_out_multiplier", 1.0),
            ),
        )
    )
    layers = [LayerSpec(mixer, mlp, norm_spec(fields))] * fields.integer("num_hidden_layers")
    return decoder_spec(
        fields,
        "falcon_h1",
        "FalconH1ForCausalLM",
        layers,
        embed_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=fields.number("lm_head_multiplier", 1.0),
    )


def _mamba(fields: ConfigFields) -> Mamba2Spec:
    inner = fields.integer("mamba_d_ssm", fields.integer("mamba_expand", 2) * fields.integer("hidden_size"))
    heads = fields.integer("mamba_n_heads")
    head_dim = inner // heads if fields.get("mamba_d_head", "auto") == "auto" else fields.integer("mamba_d_head")
    if heads * head_dim != inner:
        raise fields.error("mamba_n_heads", f"{heads} heads of {head_dim} numbers are not the {inner} of the mixer")
    z, x, b, c, dt = _numbers(fields, "ssm_multipliers", 5)
    return Mamba2Spec(
        heads,
        head_dim,
        fields.integer("mamba_d_state"),
        fields.integer("mamba_n_groups", 1),
        fields.integer("mamba_d_conv", 4),
        norm_spec(fields) if fields.get("mamba_rms_norm", False) else None,
        gate_first=not fields.get("mamba_norm_before_gate", True),
        filter_bias=bool(fields.get("mamba_conv_bias", True)),
        in_bias=bool(fields.get("mamba_proj_bias", False)),
        out_bias=bool(fields.get("projectors_bias", False)),
        dt_limit=bounds(fields, "time_step_limit"),
        scales=(z, x, b, c, dt),
    )


def _numbers(fields: ConfigFields, field: str, count: int) -> list[float]:
    """Reads `count` multipliers; default: ones."""
    numbers = fields.get(field, [1.0] * count)
    if not isinstance(numbers, list) or len(numbers) != count or not all(isinstance(n, int | float) for n in numbers):
        raise fields.error(field, f"{field} must be {count} numbers, found {numbers!r}")
    return numbers


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors: each is one leaf, or one layer of it, with the rows of fused projections in groups."""
    return with_mamba_groups(one_to_one(spec, MODULES, OUTSIDE), spec)
