"""LFM2: gated short convolutions, with attention in some layers (https://arxiv.org/abs/2511.23404)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshtune.arrays.spec import ArraySpec
from meshtune.families.config_fields import ConfigFields, read_rope
from meshtune.families.family import Family
from meshtune.families.llama import attention_spec, decoder_spec, head_sizes
from meshtune.families.recurrent import LIMITS, with_filters
from meshtune.families.tensors import TensorMap, View, one_to_one, with_view
from meshtune.model.block import FeedForward
from meshtune.model.layer import LayerSpec
from meshtune.model.mlp import MlpSpec
from meshtune.model.norm import NormSpec
from meshtune.model.short_conv import ShortConvSpec
from meshtune.model.spec import ModelSpec

DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 128_000, "tie_word_embeddings": True}
MODULES = {
    "attn_norm": "operator_norm",
    "conv_norm": "operator_norm",
    "mlp_norm": "ffn_norm",
    "attn/q": "self_attn.q_proj",
    "attn/k": "self_attn.k_proj",
    "attn/v": "self_attn.v_proj",
    "attn/o": "self_attn.out_proj",
    "attn/q_norm": "self_attn.q_layernorm",
    "attn/k_norm": "self_attn.k_layernorm",
    "conv/in": "conv.in_proj",
    "conv/filter": "conv.conv",
    "conv/out": "conv.out_proj",
    "mlp/gate": "feed_forward.w1",
    "mlp/up": "feed_forward.w3",
    "mlp/down": "feed_forward.w2",
}
OUTSIDE = {"embed": "model.embed_tokens", "norm": "model.embedding_norm", "head": "lm_head", "score": "score"}
# Fields of published configs that transformers does not read.
UNUSED = """
    block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu block_use_xavier_init conv_dim
    conv_dim_out conv_use_xavier_init num_heads theta use_pos_enc
""".split()

DESCRIPTIONS = {
    "lfm2": Family(
        title="LFM2",
        special="gated short convolutions, attention with normalised queries and keys in some layers",
        models=("LiquidAI/LFM2-1.2B", "LiquidAI/LFM2-2.6B"),
        group="hybrid",
        limits=LIMITS,
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """Lfm2Config -> ModelSpec."""
    fields = ConfigFields(DEFAULTS | config, where)
    for unused in UNUSED:
        fields.get(unused)
    mlp = MlpSpec(_ffn_width(fields))
    layers = hybrid_layers(fields, [mlp] * fields.integer("num_hidden_layers"))
    tied = bool(fields.get("tie_embedding", fields.get("tie_word_embeddings")))
    return decoder_spec(fields, "lfm2", "Lfm2ForCausalLM", layers, tied=tied)


def hybrid_layers(fields: ConfigFields, ffns: Sequence[FeedForward]) -> list[LayerSpec]:
    """The layers around these feed-forward networks."""
    norm = NormSpec(fields.number("norm_eps", 1e-5))
    rope = read_rope(fields, head_sizes(fields)[2], theta=1_000_000.0)
    conv = ShortConvSpec(
        fields.integer("conv_L_cache", 3), fields.integer("hidden_size"), bool(fields.get("conv_bias", False))
    )
    mixers = {"full_attention": attention_spec(fields, rope=rope, qk_norm=norm), "conv": conv}
    attended = fields.get("full_attn_idxs")

    def default(index: int) -> str:
        return "full_attention" if attended is None or index in attended else "conv"

    kinds = fields.layer_types(tuple(mixers), default)
    return [LayerSpec(mixers[kind], ffn, norm) for kind, ffn in zip(kinds, ffns, strict=True)]


def _ffn_width(fields: ConfigFields) -> int:
    """The width of the feed-forward network, which the fields give before it is made that of a gated one."""
    width = fields.integer("block_ff_dim", fields.integer("intermediate_size", 12288))
    multiple, multiplier = fields.integer("block_multiple_of", 256), fields.get("block_ffn_dim_multiplier", 1.0)
    if not fields.get("block_auto_adjust_ff_dim", True):
        return width
    return -(-int(multiplier * int(2 * width / 3)) // multiple) * multiple


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors: each is one leaf, or one layer of it; the thirds of in_proj stand row by row in memory."""
    return with_convolutions(one_to_one(spec, MODULES, OUTSIDE))


def with_convolutions(table: Sequence[TensorMap]) -> list[TensorMap]:
    """The table with the rows of the convolutions' projections and filters as files have them."""
    for leaf in ("weight", "bias"):
        table = with_view(table, f"conv/in/{leaf}", _in_thirds)
    return with_filters(table, "conv/filter")


def _in_thirds(array: ArraySpec) -> View:
    rows, *columns = array.shape[1:]
    in_file = View.identity((rows, *columns)).split(3, rows // 3, *columns)
    return in_file.transpose(1, 0, *range(2, 2 + len(columns))).merge(rows, *columns)
