"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: Llama's layers with fused projections and LongRoPE
(https://arxiv.org/abs/2404.14219)."""

from __future__ import annotations

from typing import Any

from meshtune.families.config_fields import ConfigFields, read_rope
from meshtune.families.family import FUSED_ROWS, Family
from meshtune.families.llama import OUTSIDE, attention_spec, decoder_spec, head_sizes, mlp_spec, norm_spec
from meshtune.families.packed import with_gate_up_in_halves, with_qkv_in_blocks
from meshtune.families.tensors import TensorMap, one_to_one
from meshtune.model.layer import LayerSpec
from meshtune.model.spec import ModelSpec

MODULES = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attn/qkv": "self_attn.qkv_proj",
    "attn/o": "self_attn.o_proj",
    "mlp/gate_up": "mlp.gate_up_proj",
    "mlp/down": "mlp.down_proj",
}

DESCRIPTIONS = {
    "phi3": Family(
        title="Phi-3, Phi-3.5, Phi-4",
        special="fused projections, partial rotation (Phi-4-mini), LongRoPE (by the length of each document)",
        models=("microsoft/Phi-4-mini-instruct", "microsoft/phi-4", "microsoft/Phi-3.5-mini-instruct"),
        limits=FUSED_ROWS,
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """Phi3Config -> ModelSpec. A sliding window holds for all layers."""
    fields = ConfigFields({"rms_norm_eps": 1e-5} | config, where)
    fields.harmless("auto_map")
    for unchanged in ("full_attn_mod", "interpolate_factor"):
        fields.only(unchanged, 1)
    for absent in ("attention_bias", "mlp_bias", "lm_head_bias"):
        fields.only(absent, False)
    head_dim = head_sizes(fields)[2]
    rope = read_rope(fields, head_dim, theta=10000.0, rotated=1.0)
    attention = attention_spec(fields, rope=rope, window=fields.get("sliding_window"), packed=True)
    layer = LayerSpec(attention, mlp_spec(fields, packed=True), norm_spec(fields))
    return decoder_spec(fields, "phi3", "Phi3ForCausalLM", [layer] * fields.integer("num_hidden_layers"))


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors: each is one leaf, or one layer of it, with the rows of fused projections in blocks."""
    return with_gate_up_in_halves(with_qkv_in_blocks(one_to_one(spec, MODULES, OUTSIDE), spec))
