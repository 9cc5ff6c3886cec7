"""gpt-oss: attention with sinks, windows in every other layer, experts with biases and a clamped activation
(https://arxiv.org/abs/2508.10925)."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshtune.families.config_fields import ConfigFields, read_rope
from meshtune.families.expert_layout import ExpertLayout
from meshtune.families.experts import experts_spec, transpose_experts
from meshtune.families.family import OVERFLOWS_IN_UNSLOTH, Family
from meshtune.families.llama import MODULES, OUTSIDE, attention_spec, decoder_spec, head_sizes
from meshtune.families.tensors import Shape, Stored, TensorMap, View, one_to_one
from meshtune.model.layer import LayerSpec
from meshtune.model.norm import NormSpec
from meshtune.model.spec import ModelSpec

LAYOUT = ExpertLayout(transposed=True, marked=True, interleaved=True)
ALPHA = 1.702  # of the activation, in the sigmoid
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
    "rope_theta": 150000.0,
}

DESCRIPTIONS = {
    "gpt_oss": Family(
        title="gpt-oss",
        special="attention sinks, windows in every other layer, experts with biases and a clamped activation; files in "
        "mxfp4, as published, or bfloat16",
        models=("openai/gpt-oss-20b", "openai/gpt-oss-120b"),
        overflow=OVERFLOWS_IN_UNSLOTH,
        group="mixture of experts",
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """GptOssConfig -> ModelSpec, with transformers' defaults for fields that are absent."""
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None and "rope_theta" not in config:
        config = config | {"rope_parameters": YARN}
    fields = ConfigFields({"head_dim": 64, "rms_norm_eps": 1e-5} | config, where)
    fields.only("hidden_act", "silu")
    fields.only("swiglu_alpha", ALPHA)
    fields.only("experts_per_token", fields.integer("num_experts_per_tok", 4))  # published configs have both names
    fields.get("initial_context_length")
    bias = bool(fields.get("attention_bias", True))
    rope = read_rope(fields, head_sizes(fields)[2], theta=150000.0)
    full = attention_spec(fields, rope=rope, qkv_bias=bias, out_bias=bias, sinks=True)
    experts = experts_spec(
        fields,
        width="intermediate_size",
        router={"normalize": True, "bias": True},
        bias=True,
        clamp=fields.number("swiglu_limit", 7.0),
    )
    norm = NormSpec(fields.number("rms_norm_eps"))
    window = fields.get("sliding_window", 128)
    layers = {
        "full_attention": LayerSpec(full, experts, norm),
        "sliding_attention": LayerSpec(dataclasses.replace(full, window=window), experts, norm),
    }
    kinds = fields.layer_types(tuple(layers), lambda index: "full_attention" if index % 2 else "sliding_attention")
    return decoder_spec(fields, "gpt_oss", "GptOssForCausalLM", [layers[kind] for kind in kinds])


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors: experts are fused, [E, in, out], with columns of the gate and of up in turn."""
    return one_to_one(spec, {**MODULES, **_experts(), "attn/sinks/weight": _as_it_is("self_attn.sinks")}, OUTSIDE)


def _experts() -> dict[str, str | Stored]:
    modules: dict[str, str | Stored] = {"mlp/router": "mlp.router"}
    for part, name in enumerate(("gate", "up")):
        modules[f"mlp/experts/{name}/weight"] = Stored(
            "mlp.experts.gate_up_proj",
            f"mlp.experts.{name}_proj",
            lambda shape, part=part: _columns(shape, part),
            layout=LAYOUT,
        )
        modules[f"mlp/experts/{name}/bias"] = Stored(
            "mlp.experts.gate_up_proj_bias", f"mlp.experts.{name}_proj", lambda shape, part=part: _numbers(shape, part)
        )
    modules["mlp/experts/down/weight"] = Stored(
        "mlp.experts.down_proj", "mlp.experts.down_proj", transpose_experts, layout=LAYOUT
    )
    modules["mlp/experts/down/bias"] = Stored("mlp.experts.down_proj_bias", "mlp.experts.down_proj", View.identity)
    return modules


def _as_it_is(name: str) -> Stored:
    return Stored(name, name, View.identity)


def _columns(shape: Shape, part: int) -> View:
    """Every second column, from `part` on, of a tensor [E, D, 2 F], as [E, F, D]."""
    experts, width, embed = shape
    tensor = View.identity((experts, embed, 2 * width)).split(experts, embed, width, 2)
    return tensor.slice(3, part, part + 1).transpose(0, 2, 3, 1).merge(experts, width, embed)


def _numbers(shape: Shape, part: int) -> View:
    """Every second number, from `part` on, of a tensor [E, 2 F], as [E, F]."""
    experts, width = shape
    return View.identity((experts, 2 * width)).split(experts, width, 2).slice(2, part, part + 1).merge(experts, width)
