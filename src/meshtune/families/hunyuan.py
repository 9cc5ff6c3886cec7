"""Hunyuan dense, 0.5B to 7B, and Hunyuan-MT: Llama's layout with queries and keys normalised after rotation."""

from __future__ import annotations

import re
from typing import Any

from meshtune.families.config_fields import ConfigFields, read_rope
from meshtune.families.family import Family
from meshtune.families.llama import MODULES, OUTSIDE, attention_spec, decoder_spec, head_sizes, mlp_spec
from meshtune.families.tensors import TensorMap, one_to_one
from meshtune.model.attention import AttentionSpec
from meshtune.model.layer import LayerSpec
from meshtune.model.norm import NormSpec
from meshtune.model.spec import ModelSpec

NORMS = {"attn/q_norm": "self_attn.query_layernorm", "attn/k_norm": "self_attn.key_layernorm"}
# Fields of published configs that describe other models of the same code: image and video towers, pooling, classes.
TOKEN_FIELD = re.compile(
    r"(vit|anyres|im|image|video|text|pool|class|skip_cls|mask_init|num_media|qk|kv_lora|q_lora|v_head|xdrope)(_.*)?"
)
LEFTOVERS = (
    "auto_map eod_token_id sep_token_id pad_id org_vocab_size dense_list cla_share_factor group_limited_greedy "
    "topk_group n_group routed_scaling_factor norm_topk_prob enable_lm_head_fp32"
).split()

DESCRIPTIONS = {
    "hunyuan_v1_dense": Family(
        title="Hunyuan dense and Hunyuan-MT",
        special="queries and keys are normalised after they are rotated; a base frequency stretched by alpha",
        models=("tencent/Hunyuan-7B-Instruct", "tencent/Hunyuan-0.5B-Instruct", "tencent/Hunyuan-MT-7B"),
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """HunYuanDenseV1Config -> ModelSpec."""
    fields = ConfigFields(config, where)
    read_variants(fields, config)
    norm = NormSpec(fields.number("rms_norm_eps", 1e-5))
    fields.only("mlp_bias", False)
    fields.only("num_experts", 1)
    layer = LayerSpec(hunyuan_attention(fields, norm), mlp_spec(fields), norm)
    layers = [layer] * fields.integer("num_hidden_layers")
    return decoder_spec(fields, "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", layers)


def read_variants(fields: ConfigFields, config: dict[str, Any]) -> None:
    """Refuses the variants that published configs can switch on and that transformers does not implement."""
    fields.harmless(*LEFTOVERS, *(name for name in config if TOKEN_FIELD.fullmatch(name)))
    for off in ("use_cla", "use_mla", "position_embedding_xdrope", "add_classification_head"):
        fields.only(off, False)
    for on in ("use_qk_norm", "use_rotary_pos_emb"):
        fields.only(on, True)
    fields.only("norm_type", "rms", "hf_rms", "fused")
    fields.only("attention_head_dim", None, head_sizes(fields)[2])


def hunyuan_attention(fields: ConfigFields, norm: NormSpec) -> AttentionSpec:
    """Attention with a norm of queries and keys behind the rotation."""
    rope = read_rope(fields, head_sizes(fields)[2], theta=10000.0)
    bias = bool(fields.get("attention_bias", False))
    return attention_spec(fields, rope=rope, qkv_bias=bias, out_bias=bias, qk_norm=norm, qk_norm_after_rope=True)


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors: each is one leaf, or one layer of it."""
    return one_to_one(spec, MODULES | NORMS, OUTSIDE)
