"""Command R7B and Command A: Command R with a sliding window in three of four layers, and positions in these alone
(https://arxiv.org/abs/2504.00698)."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshtune.families import cohere
from meshtune.families.cohere import tensors
from meshtune.families.config_fields import ConfigFields, read_rope
from meshtune.families.family import Family
from meshtune.families.llama import attention_spec, decoder_spec, head_sizes, mlp_spec
from meshtune.model.layer import LayerSpec
from meshtune.model.spec import ModelSpec

__all__ = ["model_spec", "tensors"]

DESCRIPTIONS = {
    "cohere2": Family(
        title="Command R7B, Command A",
        special="Command R with windows in three of four layers; the others have no positions",
        models=("CohereForAI/c4ai-command-r7b-12-2024", "CohereForAI/c4ai-command-a-03-2025"),
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """Cohere2Config -> ModelSpec, with transformers' defaults for fields that are absent."""
    fields = cohere.cohere_fields({"sliding_window": 4096} | config, where)
    heads, _, head_dim = head_sizes(fields)
    if head_dim * heads != fields.integer("hidden_size"):
        raise fields.error("head_dim", f"head_dim = {head_dim} is not hidden_size over the number of heads, as it must")
    bias, norm = bool(fields.get("attention_bias", False)), cohere.norm_spec(fields)
    full = attention_spec(fields, rope=None, qkv_bias=bias, out_bias=bias)
    mlp = mlp_spec(fields)
    layers = {"full_attention": LayerSpec(full, mlp, norm, "parallel_shared")}
    kinds = _layer_types(fields)
    rope = read_rope(fields, head_dim, theta=10_000.0, interleaved=True)
    fields.get("sliding_window")
    if "sliding_attention" in kinds:
        sliding = dataclasses.replace(full, rope=rope, window=fields.integer("sliding_window"))
        layers["sliding_attention"] = LayerSpec(sliding, mlp, norm, "parallel_shared")
    return decoder_spec(
        fields,
        "cohere2",
        "Cohere2ForCausalLM",
        [layers[kind] for kind in kinds],
        logit_scale=fields.number("logit_scale", 0.0625),
    )


def _layer_types(fields: ConfigFields) -> list[str]:
    """The kind of every layer: every fourth one attends to the whole past, or as older configs say."""
    pattern = fields.integer("sliding_window_pattern", 4)
    if fields.get("layer_types") is None:
        fields.only("layer_switch", pattern)
        fields.only("order_of_interleaved_layers", "local_attn_first")
    for field in ("layer_switch", "order_of_interleaved_layers"):
        fields.get(field)

    def default(index: int) -> str:
        return "sliding_attention" if (index + 1) % pattern else "full_attention"

    return fields.layer_types(("full_attention", "sliding_attention"), default)
