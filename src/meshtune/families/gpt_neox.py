"""GPT-NeoX and Pythia: layer norms, biases, a quarter of each head rotated, attention in parallel to the feed-forward
network (https://arxiv.org/abs/2204.06745, https://arxiv.org/abs/2304.01373)."""

from __future__ import annotations

import dataclasses

from meshtune.families.config_fields import ConfigFields, read_rope
from meshtune.families.family import FUSED_ROWS, Family
from meshtune.families.llama import attention_spec, decoder_spec, head_sizes, mlp_spec
from meshtune.families.tensors import TensorMap, one_to_one
from meshtune.model.layer import LayerSpec
from meshtune.model.norm import NormSpec
from meshtune.model.spec import ModelSpec

LAYERS = "gpt_neox.layers"
MODULES = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attn/qkv": "attention.query_key_value",
    "attn/o": "attention.dense",
    "mlp/up": "mlp.dense_h_to_4h",
    "mlp/down": "mlp.dense_4h_to_h",
}
OUTSIDE = {"embed": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "head": "embed_out", "score": "score"}

DESCRIPTIONS = {
    "gpt_neox": Family(
        title="GPT-NeoX, Pythia",
        special="layer norms, biases, fused queries, keys and values, a quarter of each head rotated, parallel blocks "
        "with a norm each",
        models=("EleutherAI/pythia-1.4b", "EleutherAI/gpt-neox-20b"),
        limits=FUSED_ROWS,
    )
}


def model_spec(config: dict[str, object], where: str) -> ModelSpec:
    """GPTNeoXConfig -> ModelSpec, with transformers' defaults for fields that are absent."""
    fields = ConfigFields(config, where)
    heads, _, head_dim = head_sizes(fields)
    fields.only("num_key_value_heads", heads)
    fields.only("head_dim", fields.integer("hidden_size") // heads)
    # transformers reads rotary_emb_base and rotary_pct; configs that it wrote have the others as well.
    theta, share = fields.number("rotary_emb_base", 10_000.0), fields.number("rotary_pct", 0.25)
    fields.only("rope_theta", theta)
    fields.only("partial_rotary_factor", share)
    bias = bool(fields.get("attention_bias", True))
    attention = attention_spec(
        fields,
        rope=read_rope(fields, head_dim, theta=theta, rotated=share),
        qkv_bias=bias,
        out_bias=bias,
        packed=True,
    )
    mlp = mlp_spec(fields, default="gelu", gated=False, bias=True)
    placement = "parallel" if fields.get("use_parallel_residual", True) else "pre"
    layer = LayerSpec(attention, mlp, NormSpec(fields.number("layer_norm_eps", 1e-5), "layer"), placement)
    return decoder_spec(fields, "gpt_neox", "GPTNeoXForCausalLM", [layer] * fields.integer("num_hidden_layers"))


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors: each is one leaf, or one layer of it. Rows of queries, keys and values stand head by head,
    as in memory. transformers 5 calls the head's module lm_head, and its tensor in files by the older name."""
    table = one_to_one(spec, MODULES, OUTSIDE, LAYERS)
    return [dataclasses.replace(entry, owner="lm_head") if entry.path == "head/weight" else entry for entry in table]
