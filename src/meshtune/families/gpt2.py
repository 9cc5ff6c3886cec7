"""GPT-2: learned positions, layer norms and biases, weights that files hold transposed, [in, out]
(https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf)."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshtune.arrays.spec import ArraySpec
from meshtune.families.config_fields import ConfigFields
from meshtune.families.family import FUSED_ROWS, Family
from meshtune.families.llama import attention_spec, decoder_spec, head_sizes, mlp_spec
from meshtune.families.tensors import TensorMap, View, one_to_one, with_view
from meshtune.model.layer import LayerSpec
from meshtune.model.norm import NormSpec
from meshtune.model.spec import ModelSpec

ARCHITECTURE, LANGUAGE = "GPT2LMHeadModel", "ForCausalLM"
LAYERS = "transformer.h"
MODULES = {
    "attn_norm": "ln_1",
    "mlp_norm": "ln_2",
    "attn/qkv": "attn.c_attn",
    "attn/o": "attn.c_proj",
    "mlp/up": "mlp.c_fc",
    "mlp/down": "mlp.c_proj",
}
OUTSIDE = {
    "embed": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "score": "score",
}
NAMES = {
    "n_embd": "hidden_size",
    "n_positions": "max_position_embeddings",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
}
# Of heads that are not language models', of the order of rounding, and an older name of n_positions.
HARMLESS = (
    "summary_type",
    "summary_use_proj",
    "summary_activation",
    "summary_proj_to_labels",
    "reorder_and_upcast_attn",
    "n_ctx",
)

DESCRIPTIONS = {
    "gpt2": Family(
        title="GPT-2",
        special="learned positions, layer norms, biases, fused queries, keys and values, transposed weights in files",
        models=("openai-community/gpt2", "openai-community/gpt2-xl"),
        limits=FUSED_ROWS,
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """GPT2Config -> ModelSpec, with transformers' defaults for fields that are absent."""
    fields = ConfigFields(_rename_fields(config), where)
    for name, usual in NAMES.items():
        if config.get(name, config.get(usual)) != config.get(usual, config.get(name)):
            raise fields.error(name, f"{name} is {config[name]!r}, and {usual}, its other name, is {config[usual]!r}")
    fields.harmless(*HARMLESS)
    heads, _, head_dim = head_sizes(fields)
    fields.only("num_key_value_heads", heads)
    fields.only("head_dim", fields.integer("hidden_size") // heads)
    scale = head_dim**-0.5 if fields.get("scale_attn_weights", True) else 1.0
    by_layer = bool(fields.get("scale_attn_by_inverse_layer_idx", False))
    attention = attention_spec(fields, rope=None, scale=scale, qkv_bias=True, out_bias=True, packed=True)
    mlp = mlp_spec(fields, "activation_function", "gelu_new", gated=False, bias=True)
    norm = NormSpec(fields.number("layer_norm_epsilon", 1e-5), "layer")
    layers = [
        LayerSpec(dataclasses.replace(attention, scale=scale / (index + 1)) if by_layer else attention, mlp, norm)
        for index in range(fields.integer("num_hidden_layers"))
    ]
    return decoder_spec(fields, "gpt2", ARCHITECTURE, layers, learned_positions=True)


def _rename_fields(config: dict[str, Any]) -> dict[str, Any]:
    """The config with the names of the usual fields."""
    renamed = {"tie_word_embeddings": True, "max_position_embeddings": 1024}
    renamed |= {NAMES.get(key, key): value for key, value in config.items()}
    if renamed.get("architectures") == [f"GPT2{LANGUAGE}"]:  # what a reward model was made from
        renamed["architectures"] = [ARCHITECTURE]
    width = renamed.get("hidden_size")
    if renamed.get("intermediate_size") is None and isinstance(width, int):
        renamed["intermediate_size"] = 4 * width
    return renamed


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors: each is one leaf, or one layer of it; matrices are transposed, and columns of queries, keys
    and values form three blocks."""
    table = one_to_one(spec, MODULES, OUTSIDE, LAYERS)
    for ending in ("attn/o/weight", "mlp/up/weight", "mlp/down/weight"):
        table = with_view(table, ending, _transpose_view)
    attention = spec.layer_kinds[0].mixer
    assert attention is not None
    heads = attention.divisors()[0].size
    table = with_view(table, "attn/qkv/weight", lambda array: _head_by_head(array, heads))
    return with_view(table, "attn/qkv/bias", lambda array: _head_by_head(array, heads))


def _transpose_view(array: ArraySpec) -> View:
    rows, columns = array.shape[1:]
    return View.identity((columns, rows)).transpose(1, 0)


def _head_by_head(array: ArraySpec, heads: int) -> View:
    rows, *columns = array.shape[1:]
    parts = (3, heads, rows // (3 * heads))
    if not columns:
        return View.identity((rows,)).split(*parts).transpose(1, 0, 2).merge(rows)
    return View.identity((*columns, rows)).split(*columns, *parts).transpose(2, 1, 3, 0).merge(rows, *columns)
