"""OLMo 2: Llama's layers with the norms after each block, and all queries, and all keys, normalised together
(https://arxiv.org/abs/2501.00656)."""

from __future__ import annotations

from meshtune.families import qwen3
from meshtune.families.config_fields import ConfigFields, read_rope
from meshtune.families.family import Family
from meshtune.families.llama import MODULES, OUTSIDE, attention_spec, decoder_spec, head_sizes, mlp_spec
from meshtune.families.tensors import TensorMap, one_to_one
from meshtune.model.attention import AttentionSpec
from meshtune.model.layer import LayerSpec
from meshtune.model.norm import NormSpec
from meshtune.model.rope import RopeSpec
from meshtune.model.spec import ModelSpec

NORMS = {"attn_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}

DESCRIPTIONS = {
    "olmo2": Family(
        title="OLMo 2",
        special="norms after each block, queries and keys normalised over all heads",
        models=("allenai/OLMo-2-1124-7B-Instruct", "allenai/OLMo-2-0425-1B-Instruct"),
    )
}


def model_spec(config: dict[str, object], where: str) -> ModelSpec:
    """Olmo2Config -> ModelSpec."""
    fields = ConfigFields(config, where)
    attention = attention_without_window(fields, read_rope(fields, head_sizes(fields)[2], theta=10000.0))
    layer = LayerSpec(attention, mlp_spec(fields), norm_spec(fields), "post")
    return decoder_spec(fields, "olmo2", "Olmo2ForCausalLM", [layer] * fields.integer("num_hidden_layers"))


def norm_spec(fields: ConfigFields) -> NormSpec:
    """Root mean square normalisation with rms_norm_eps."""
    return NormSpec(fields.number("rms_norm_eps", 1e-5))


def attention_without_window(fields: ConfigFields, rope: RopeSpec) -> AttentionSpec:
    """The attention of OLMo 2, and of OLMo 3 before its window."""
    bias = bool(fields.get("attention_bias", False))
    norm = norm_spec(fields)
    return attention_spec(fields, rope=rope, qkv_bias=bias, out_bias=bias, qk_norm=norm, qk_norm_over="vector")


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors: each is one leaf, or one layer of it."""
    return one_to_one(spec, MODULES | NORMS | qwen3.NORMS, OUTSIDE)
