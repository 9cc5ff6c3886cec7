"""Apertus: Llama's layout with normalised queries and keys and a plain feed-forward network of xIELU, an activation
with trained parameters (https://arxiv.org/abs/2509.14233)."""

from __future__ import annotations

from typing import Any

from meshtune.families import qwen3
from meshtune.families.config_fields import ConfigFields
from meshtune.families.family import Family
from meshtune.families.llama import MODULES, OUTSIDE, attention_spec, decoder_spec, mlp_spec
from meshtune.families.tensors import TensorMap, View, one_to_one, with_view
from meshtune.model.layer import LayerSpec
from meshtune.model.norm import NormSpec
from meshtune.model.spec import ModelSpec

APERTUS = {"attn_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm", "mlp/xielu": "mlp.act_fn"}
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}  # ApertusConfig's where there is neither rope_parameters nor rope_scaling

DESCRIPTIONS = {
    "apertus": Family(
        title="Apertus",
        special="a feed-forward network without a gate, of xIELU with trained parameters; normalised queries and keys",
        models=("swiss-ai/Apertus-8B-Instruct-2509", "swiss-ai/Apertus-70B-Instruct-2509"),
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """ApertusConfig -> ModelSpec."""
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        config = config | {"rope_parameters": ROPE}
    fields = ConfigFields(config, where)
    for off in ("post_norm", "mlp_bias"):
        fields.only(off, False)
    fields.only("qk_norm", True)
    norm, bias = NormSpec(fields.number("rms_norm_eps", 1e-5)), bool(fields.get("attention_bias", False))
    attention = attention_spec(fields, qkv_bias=bias, out_bias=bias, qk_norm=norm)
    layer = LayerSpec(attention, mlp_spec(fields, default="xielu", gated=False), norm)
    return decoder_spec(fields, "apertus", "ApertusForCausalLM", [layer] * fields.integer("num_hidden_layers"))


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors: each is one leaf, or one layer of it; the constants of xIELU are scalars in files."""
    table = one_to_one(spec, MODULES | qwen3.NORMS | APERTUS, OUTSIDE)
    for constant in ("beta", "eps"):
        table = with_view(table, f"mlp/xielu/{constant}", lambda _: View.identity(()).split(1))
    return table
