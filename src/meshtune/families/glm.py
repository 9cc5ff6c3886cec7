"""GLM-4 dense: Llama's layers with a fused gate and up, and a rotary embedding of pairs of neighbours in half of each
head (`glm`, https://arxiv.org/abs/2406.12793); GLM-4-0414 and GLM-Z1 add norms after each block (`glm4`)."""

from __future__ import annotations

from typing import Any

from meshtune.families.config_fields import ConfigFields, read_rope
from meshtune.families.family import OVERFLOWS_IN_VLLM, Family
from meshtune.families.llama import MODULES, OUTSIDE, attention_spec, decoder_spec, head_sizes, mlp_spec
from meshtune.families.packed import with_gate_up_in_halves
from meshtune.families.tensors import TensorMap, one_to_one
from meshtune.model.layer import LayerSpec
from meshtune.model.norm import NormSpec
from meshtune.model.spec import ModelSpec

# GlmConfig's and Glm4Config's, where they are not those of the other families.
DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True}
FUSED = {"mlp/gate_up": "mlp.gate_up_proj"}
POST_NORMS = {"attn_post_norm": "post_self_attn_layernorm", "mlp_post_norm": "post_mlp_layernorm"}
ARCHITECTURES = {"glm": "GlmForCausalLM", "glm4": "Glm4ForCausalLM"}

DESCRIPTIONS = {
    "glm": Family(
        title="GLM-4 (June 2024) and GLM-Edge",
        special="pairs of neighbours in half of each head are rotated, gate and up are fused, biases on queries, keys "
        "and values",
        models=("zai-org/glm-4-9b-chat-hf", "zai-org/glm-edge-1.5b-chat"),
    ),
    "glm4": Family(
        title="GLM-4-0414 and GLM-Z1",
        special="as GLM-4, with norms after each block too",
        models=("zai-org/GLM-4-9B-0414", "zai-org/GLM-Z1-9B-0414", "zai-org/GLM-4-32B-0414"),
        overflow=OVERFLOWS_IN_VLLM,
    ),
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """GlmConfig or Glm4Config -> ModelSpec."""
    fields = ConfigFields(DEFAULTS | config, where)
    kind = config["model_type"]
    rope = read_rope(fields, head_sizes(fields)[2], theta=10000.0, rotated=0.5, interleaved=True, mrope="blocks")
    attention = attention_spec(fields, rope=rope, qkv_bias=bool(fields.get("attention_bias")))
    norm = NormSpec(fields.number("rms_norm_eps", 1.5625e-7))
    layer = LayerSpec(attention, mlp_spec(fields, packed=True), norm, "both" if kind == "glm4" else "pre")
    return decoder_spec(fields, kind, ARCHITECTURES[kind], [layer] * fields.integer("num_hidden_layers"))


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors: each is one leaf, or one layer of it, with gate and up in halves."""
    return with_gate_up_in_halves(one_to_one(spec, MODULES | FUSED | POST_NORMS, OUTSIDE))
