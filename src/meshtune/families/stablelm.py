"""StableLM: layer norms, a quarter of each head rotated; the 12B has parallel blocks and a separate norm for each
head's queries and keys (https://arxiv.org/abs/2402.17834)."""

from __future__ import annotations

from typing import Any

from meshtune.families.config_fields import ConfigFields, read_rope
from meshtune.families.family import Family
from meshtune.families.llama import MODULES, OUTSIDE, attention_spec, decoder_spec, head_sizes, mlp_spec
from meshtune.families.tensors import Stored, TensorMap, one_to_one
from meshtune.model.layer import LayerSpec
from meshtune.model.norm import NormSpec
from meshtune.model.spec import ModelSpec

HEAD_NORMS = {
    f"attn/{name}_norm": Stored(f"self_attn.{name}_layernorm.norms.{{}}", f"self_attn.{name}_layernorm")
    for name in ("q", "k")
}

DESCRIPTIONS = {
    "stablelm": Family(
        title="StableLM 3B, StableLM 2",
        special="layer norms, a quarter of each head rotated; 12B: parallel blocks, a norm for each head",
        models=("stabilityai/stablelm-2-1_6b", "stabilityai/stablelm-2-12b-chat", "stabilityai/stablelm-zephyr-3b"),
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """StableLmConfig -> ModelSpec, with transformers' defaults for fields that are absent."""
    fields = ConfigFields({"num_key_value_heads": 32} | config, where)
    eps = fields.number("layer_norm_eps", 1e-5)
    heads, _, head_dim = head_sizes(fields)
    if head_dim * heads != fields.integer("hidden_size"):
        raise fields.error("head_dim", f"head_dim = {head_dim} is not hidden_size over the number of heads, as it must")
    attention = attention_spec(
        fields,
        rope=read_rope(fields, head_dim, theta=10_000.0, rotated=0.25),
        qkv_bias=bool(fields.get("use_qkv_bias", False)),
        qk_norm=NormSpec(eps, "layer_scale") if fields.get("qk_layernorm", False) else None,
        qk_norm_over="own_head",
    )
    placement = "parallel_shared" if fields.get("use_parallel_residual", False) else "pre"
    layer = LayerSpec(attention, mlp_spec(fields), NormSpec(eps, "layer"), placement)
    return decoder_spec(fields, "stablelm", "StableLmForCausalLM", [layer] * fields.integer("num_hidden_layers"))


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors: each is one leaf, or one layer of it; norms of queries and keys, one head of a layer."""
    return one_to_one(spec, MODULES | HEAD_NORMS, OUTSIDE)
