"""Baichuan and Baichuan2, 7B with rotary positions and 13B with ALiBi (https://arxiv.org/abs/2309.10305).

Llama's layers, with queries, keys and values made by one projection, W_pack. Baichuan2's output head divides its rows
by their length. The code that these models ship with is not needed and never run.
"""

from __future__ import annotations

import math
from typing import Any

from meshtune.families.config_fields import ConfigFields
from meshtune.families.family import FUSED_ROWS, Family
from meshtune.families.llama import OUTSIDE, mlp_spec, norm_spec
from meshtune.families.packed import with_qkv_in_blocks
from meshtune.families.tensors import TensorMap, one_to_one
from meshtune.model.attention import AlibiSpec, AttentionSpec
from meshtune.model.layer import LayerSpec
from meshtune.model.rope import RopeSpec
from meshtune.model.spec import ModelSpec, stacks_of

MODULES = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attn/qkv": "self_attn.W_pack",
    "attn/o": "self_attn.o_proj",
    "mlp/gate": "mlp.gate_proj",
    "mlp/up": "mlp.up_proj",
    "mlp/down": "mlp.down_proj",
}
# The first generation has a vocabulary of its own and a plain head; its 7B also writes its architecture otherwise.
FIRST_VOCABULARY = 64000
ARCHITECTURE, FIRST_7B = "BaichuanForCausalLM", "BaiChuanForCausalLM"
WIDTH_7B = 4096
THETA = 10000.0

DESCRIPTIONS = {
    "baichuan": Family(
        title="Baichuan and Baichuan2",
        special="fused queries, keys and values; 13B: biases by distance (ALiBi); Baichuan2: a normalised head",
        models=("baichuan-inc/Baichuan2-7B-Chat", "baichuan-inc/Baichuan2-13B-Chat"),
        template="baichuan2",
        limits=FUSED_ROWS,
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """BaichuanConfig -> ModelSpec. Only a 7B's config has max_position_embeddings: that says which positions it has."""
    fields = ConfigFields(config, where)
    embed, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if embed % heads:
        raise fields.error("hidden_size", f"hidden_size {embed} does not divide by {heads} heads")
    head_dim = embed // heads
    fields.only("num_key_value_heads", heads)
    fields.only("head_dim", head_dim)
    fields.only("tie_word_embeddings", False)
    fields.only("rope_theta", THETA, int(THETA))
    fields.harmless(
        "z_loss_weight", "auto_map", "gradient_checkpointing"
    )  # how it was trained, and code that is not run
    if config.get("z_loss_weight"):
        raise fields.error(
            "z_loss_weight",
            f"z_loss_weight = {config['z_loss_weight']!r}: a loss on the size of logits is not implemented",
            "set it to 0: it has no part in the model's logits, and was for pretraining",
        )
    first = fields.integer("vocab_size") == FIRST_VOCABULARY
    rope, alibi, longest = _positions(fields, embed, heads, head_dim)
    attention = AttentionSpec(heads, heads, head_dim, rope=rope, alibi=alibi, packed=True)
    norm = norm_spec(fields)
    spec = ModelSpec(
        family="baichuan",
        vocab=fields.integer("vocab_size"),
        embed=embed,
        stacks=stacks_of([LayerSpec(attention, mlp_spec(fields), norm)] * fields.integer("num_hidden_layers")),
        norm=norm,
        max_length=longest,
        init_std=fields.number("initializer_range", 0.02),
        norm_head=not first,
    )
    fields.finish(FIRST_7B if first and rope is not None else ARCHITECTURE)
    return spec


def _positions(
    fields: ConfigFields, embed: int, heads: int, head_dim: int
) -> tuple[RopeSpec | None, AlibiSpec | None, int]:
    """(rotary positions, biases, the context in tokens)."""
    longest = fields.get("max_position_embeddings")
    if longest is None and embed == WIDTH_7B:
        raise fields.error(
            "max_position_embeddings",
            "max_position_embeddings is missing: a 7B has it (rotary positions), a 13B has not (ALiBi)",
            "take the config from the model's original; it is 4096 in all of the 7B",
        )
    if longest is None:
        return None, AlibiSpec(alibi_slopes(heads)), fields.integer("model_max_length", 4096)
    if head_dim % 2:
        raise fields.error("hidden_size", f"heads of {head_dim} are odd; rotary embedding needs pairs")
    longest = fields.integer("max_position_embeddings")
    return RopeSpec(THETA, head_dim, original_length=longest, max_length=longest), None, longest


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The slope of each head (https://arxiv.org/abs/2108.12409): a geometric series from 2^(-8/n) for a power of two n;
    else that of the power below, then every second one of the power above."""
    if heads & (heads - 1) == 0:
        return tuple(2.0 ** (-8 * (i + 1) / heads) for i in range(heads))
    below = 2 ** math.floor(math.log2(heads))
    return (*alibi_slopes(below), *alibi_slopes(2 * below)[0::2][: heads - below])


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors: each is one leaf, or one layer of it, and W_pack has its rows in another order."""
    return with_qkv_in_blocks(one_to_one(spec, MODULES, OUTSIDE), spec)
