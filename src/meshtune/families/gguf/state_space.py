"""Architectures with Mamba-2 layers: alone, in turn with attention, and beside it."""

from __future__ import annotations

import math
from typing import Any

from meshtune.families.gguf.architecture import (
    QKV,
    Architecture,
    Metadata,
    attention,
    attentions,
    by_layer,
    experts,
    integer,
)
from meshtune.families.gguf.hybrid import layer_kinds, ssm
from meshtune.families.gguf.routing import deepseek_fields, routing_metadata
from meshtune.model.attention import AttentionSpec
from meshtune.model.mamba2 import Mamba2Spec
from meshtune.model.mlp import MlpSpec
from meshtune.model.parallel import ParallelSpec
from meshtune.model.spec import ModelSpec

LEAST_STEP = 1e-3  # of Nemotron-H's time steps, which transformers has on CPUs, and no kernel for GPUs
MAMBA_BIASES = frozenset({"mamba/filter"})
NO_ATTENTION = ("num_attention_heads", "num_key_value_heads", "rope_parameters")


def _mamba(spec: ModelSpec) -> Mamba2Spec | None:
    mixers = [kind.mixer for kind in spec.layer_kinds if kind.mixer is not None]
    mixers += [part for mixer in mixers if isinstance(mixer, ParallelSpec) for part in mixer.mixers]
    return next((mixer for mixer in mixers if isinstance(mixer, Mamba2Spec)), None)


def _mamba_refusal(spec: ModelSpec) -> str | None:
    mamba = _mamba(spec)
    if mamba is None:
        return "it has no Mamba layers"
    if not mamba.filter_bias:
        return "filters without biases (use_conv_bias)"
    if mamba.dt_limit[1] != math.inf or mamba.dt_limit[0] > LEAST_STEP:
        return "time steps are limited (time_step_limit)"
    return "its result is normalised before it is gated" if mamba.norm and not mamba.gate_first else None


def _mamba_write(spec: ModelSpec) -> dict[str, Any]:
    mamba = _mamba(spec)
    assert mamba is not None
    return ssm(mamba.taps, mamba.inner, mamba.state, mamba.heads, mamba.groups)


def _mamba2_read(metadata: Metadata) -> dict[str, Any]:
    heads, inner = integer(metadata, "ssm.time_step_rank"), integer(metadata, "ssm.inner_size")
    return {
        "num_heads": heads,
        "head_dim": inner // heads,
        "state_size": metadata["ssm.state_size"],
        "n_groups": metadata["ssm.group_count"],
        "conv_kernel": metadata["ssm.conv_kernel"],
        "expand": inner // integer(metadata, "embedding_length"),
        "layer_norm_epsilon": metadata["attention.layer_norm_rms_epsilon"],
    }


def _mamba_fields(metadata: Metadata) -> dict[str, Any]:
    heads, inner = integer(metadata, "ssm.time_step_rank"), integer(metadata, "ssm.inner_size")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_d_state": metadata["ssm.state_size"],
        "mamba_n_groups": metadata["ssm.group_count"],
        "mamba_d_conv": metadata["ssm.conv_kernel"],
    }


def _granite_refusal(spec: ModelSpec) -> str | None:
    return _mamba_refusal(spec) or (None if attentions(spec) else "it has no attention")


def _granite_write(spec: ModelSpec) -> dict[str, Any]:
    block, mixer = experts(spec), attention(spec)
    fields = _mamba_write(spec) | {
        "attention.scale": mixer.scale,
        "embedding_scale": spec.embed_scale,
        "residual_scale": spec.layer_kinds[0].scale,
        "logit_scale": 1 / (spec.logit_scale or 1.0),
        "rope.scaling.finetuned": mixer.rope is not None,
    }
    if block is not None and block.shared is not None:
        fields["expert_shared_feed_forward_length"] = block.shared.width
        fields["feed_forward_length"] = block.width
    return fields


def _granite_read(metadata: Metadata) -> dict[str, Any]:
    width = metadata["feed_forward_length"]
    return {
        "attention_multiplier": metadata.get("attention.scale", 1.0),
        "embedding_multiplier": metadata.get("embedding_scale", 1.0),
        "residual_multiplier": metadata.get("residual_scale", 1.0),
        "logits_scaling": metadata.get("logit_scale", 1.0),
        "position_embedding_type": "rope" if metadata.get("rope.scaling.finetuned") else "nope",
        "layer_types": layer_kinds(metadata, "mamba", "attention"),
        "mamba_expand": integer(metadata, "ssm.inner_size") // integer(metadata, "embedding_length"),
        "num_local_experts": metadata.get("expert_count", 0),
        "shared_intermediate_size": metadata.get("expert_shared_feed_forward_length", width),
        **_mamba_fields(metadata),
    }


def _nemotron_refusal(spec: ModelSpec) -> str | None:
    if reason := _granite_refusal(spec):
        return reason
    block = experts(spec)
    if block is None:
        return None
    if any(isinstance(layer.ffn, MlpSpec) for layer in spec.layer_kinds):
        return "layers with experts beside layers with one network"
    if block.shared is None or not block.router.normalize or block.router.scoring != "sigmoid":
        return "experts that are not normalised, or without shared ones"
    return "experts are chosen in groups (n_group)" if block.router.groups > 1 else None


def _nemotron_widths(spec: ModelSpec) -> list[int]:
    return by_layer(spec, lambda layer: getattr(layer.ffn, "width", 0))


def _nemotron_write(spec: ModelSpec) -> dict[str, Any]:
    block = experts(spec)
    fields = _mamba_write(spec) | {
        "feed_forward_length": _nemotron_widths(spec),
        "attention.layer_norm_epsilon": spec.norm.eps,
    }
    if block is None or block.shared is None:
        return fields
    fields |= routing_metadata(spec, block) | {"leading_dense_block_count": None, "expert_shared_count": 1}
    return fields | {"expert_shared_feed_forward_length": block.shared.width, "moe_latent_size": block.latent}


def _nemotron_read(metadata: Metadata) -> dict[str, Any]:
    heads, inner = integer(metadata, "ssm.time_step_rank"), integer(metadata, "ssm.inner_size")
    widths, kinds = metadata["feed_forward_length"], layer_kinds(metadata, "mamba", "attention")
    widths = widths if isinstance(widths, list) else [widths] * len(kinds)
    network = "moe" if "expert_count" in metadata else "mlp"
    fields = {
        "layers_block_type": [network if width else kind for kind, width in zip(kinds, widths, strict=True)],
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // heads,
        "ssm_state_size": metadata["ssm.state_size"],
        "n_groups": metadata["ssm.group_count"],
        "conv_kernel": metadata["ssm.conv_kernel"],
    }
    if "expert_count" in metadata:
        routing = deepseek_fields(metadata)
        del routing["first_k_dense_replace"], routing["n_shared_experts"]
        fields |= routing | {
            "moe_shared_expert_intermediate_size": metadata["expert_shared_feed_forward_length"],
            "moe_latent_size": metadata.get("moe_latent_size"),
        }
    return fields


def _h1_refusal(spec: ModelSpec) -> str | None:
    if reason := _mamba_refusal(spec):
        return reason
    scaled = (spec.embed_scale or 1.0) != 1.0 or (spec.logit_scale or 1.0) != 1.0
    return "its head is its embedding, and they have multipliers" if spec.tied and scaled else None


def _h1_factors(spec: ModelSpec, path: str, rows: int) -> tuple[tuple[int, float], ...]:
    """The multipliers of inputs, parts and results, which llama.cpp's files have in the weights."""
    layer = spec.layer_kinds[0]
    assert isinstance(layer.mixer, ParallelSpec)
    assert isinstance(layer.ffn, MlpSpec)
    node = path.rpartition("/")[0]
    branches = {branch.mixer.name: branch for branch in layer.mixer.branches}
    mamba, attended = branches["mamba"], branches["attn"]
    assert isinstance(mamba.mixer, Mamba2Spec)
    assert isinstance(attended.mixer, AttentionSpec)
    if node == "mamba/in":
        parts = zip(mamba.mixer.sections, mamba.mixer.scales or (1.0,) * 5, strict=True)
        factors = tuple((count, scale * mamba.in_scale) for count, scale in parts)
        return () if all(factor == 1 for _, factor in factors) else factors
    usual = attended.mixer.head_dim**-0.5
    factor = {
        "embed": spec.embed_scale or 1.0,
        "head": spec.logit_scale or 1.0,
        "attn/q": attended.in_scale,
        "attn/k": attended.in_scale * (attended.mixer.scale or usual) / usual,
        "attn/v": attended.in_scale,
        "attn/o": attended.out_scale,
        "mamba/out": mamba.out_scale,
        "mlp/gate": layer.ffn.gate_scale or 1.0,
        "mlp/down": layer.ffn.out_scale or 1.0,
    }.get(node, 1.0)
    return () if math.isclose(factor, 1.0, rel_tol=1e-12) else ((rows, factor),)


def _h1_read(metadata: Metadata) -> dict[str, Any]:
    return _mamba_fields(metadata) | {
        "mamba_d_ssm": metadata["ssm.inner_size"],
        "mamba_norm_before_gate": False,
    }


NEMOTRON_H = Architecture(
    "nemotron_h",
    "NemotronHForCausalLM",
    mixture_name="nemotron_h_moe",
    biases=MAMBA_BIASES | {"mlp/up", "mlp/down"},
    names={"mlp_norm": "attn_norm"},
    activation="relu2",
    config={"mlp_hidden_act": "relu2"},
    marked_layers=True,
    own_routing=True,
    refusal=_nemotron_refusal,
    write=_nemotron_write,
    read=_nemotron_read,
    norm_field="layer_norm_epsilon",
    without=("rms_norm_eps", "sliding_window", "num_experts", "num_hidden_layers", "rope_parameters"),
)
STATE_SPACE: dict[str, Architecture] = {
    "mamba2": Architecture(
        "mamba2",
        "Mamba2ForCausalLM",
        biases=MAMBA_BIASES,
        refusal=_mamba_refusal,
        write=_mamba_write,
        read=_mamba2_read,
        without=(*NO_ATTENTION, "rms_norm_eps", "sliding_window", "intermediate_size"),
    ),
    "granitemoehybrid": Architecture(
        "granitehybrid",
        "GraniteMoeHybridForCausalLM",
        biases=QKV | MAMBA_BIASES,
        permuted=True,
        normalized=True,
        own_scale=True,
        marked_layers=True,
        parted_gate_up=True,
        refusal=_granite_refusal,
        write=_granite_write,
        read=_granite_read,
        without=("sliding_window", "head_dim", "num_experts"),
    ),
    "nemotron_h": NEMOTRON_H,
    "falcon_h1": Architecture(
        "falcon-h1",
        "FalconH1ForCausalLM",
        biases=MAMBA_BIASES,
        names={"mlp_norm/weight": "ffn_norm"},
        own_scale=True,
        refusal=_h1_refusal,
        factors=_h1_factors,
        write=_mamba_write,
        read=_h1_read,
        without=("sliding_window",),
    ),
}
