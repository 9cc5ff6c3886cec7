"""The config of a model in a GGUF file, rebuilt from its metadata."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Literal

import numpy as np

from meshtune.errors import UserError
from meshtune.families import model_spec
from meshtune.families.gguf.architecture import Architecture, Metadata, always
from meshtune.families.gguf.layout import gguf_layout
from meshtune.families.gguf.registry import ARCHITECTURES
from meshtune.families.gguf.rope import rope_block

Counted = Literal["all", "some", "first"]  # the layers that a number of all layers is taken of
# Keys that say nothing about the numbers, or what others say too.
HARMLESS = frozenset(
    """context_length vocab_size rope.dimension_count attention.key_length attention.value_length rope.scaling.finetuned
    feed_forward_length expert_feed_forward_length attention.sliding_window rope.scaling.attn_factor rope.scale_linear
    attention.layer_norm_epsilon rope.scaling.type rope.scaling.factor expert_shared_count use_parallel_residual
    attention.causal nextn_predict_layers rope.dimension_sections tensor_data_layout""".split()
)


def read_config(
    architecture: str,
    metadata: Metadata,
    tensors: Mapping[str, np.ndarray],
    names: Collection[str],
    rows: int,
    where: str,
) -> dict[str, Any]:
    """The config.json of a model of an architecture; `metadata` without its name before the keys, `tensors` the factors
    of frequencies, `names` those of all tensors, `rows` the rows of the embedding.

    Raises UserError for an architecture that is not read, and for metadata that says what Meshtune does not compute.
    """
    kind = _model_type(architecture, metadata, where)
    chosen = ARCHITECTURES[kind]
    try:
        config = _fields(kind, chosen, metadata, tensors, names, rows)
    except KeyError as error:
        raise UserError(
            f"the file's metadata lacks {architecture}.{error.args[0]}",
            where=where,
            fix="convert the model again with a current converter",
        ) from error
    except (ArithmeticError, AttributeError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"the file's model is not one that Meshtune computes: {error}", where=where) from error
    _check(config, architecture, metadata, where)
    return config


def _model_type(architecture: str, metadata: Metadata, where: str) -> str:
    kinds = [kind for kind, entry in ARCHITECTURES.items() if entry.name == architecture]
    if not kinds:
        known = sorted({entry.name for entry in ARCHITECTURES.values()})
        raise UserError(
            f"models of llama.cpp's architecture '{architecture}' are not read from GGUF",
            where=f"{where}, general.architecture",
            fix="give the Hugging Face repository that the file was converted from, or a folder with its safetensors; "
            f"read from GGUF are {', '.join(known)}",
        )
    if architecture == "llama":
        return "mixtral" if metadata.get("expert_count") else "llama"
    special = (kind for kind in kinds if ARCHITECTURES[kind].chosen is not always)
    return next((kind for kind in special if ARCHITECTURES[kind].chosen(metadata)), kinds[0])


def _fields(
    kind: str,
    architecture: Architecture,
    metadata: Metadata,
    tensors: Mapping[str, np.ndarray],
    names: Collection[str],
    rows: int,
) -> dict[str, Any]:
    embed, heads = _integer(metadata["embedding_length"]), _integer(metadata.get("attention.head_count", 0))
    head_dim = _integer(metadata.get("attention.key_length", embed // max(heads, 1)))
    if metadata.get("attention.value_length", head_dim) != head_dim and not architecture.latent:
        raise ValueError("attention.value_length differs from attention.key_length")
    dim = _integer(metadata.get("rope.dimension_count", head_dim))
    block = rope_block(metadata, dict(tensors), dim)
    if dim != head_dim and not architecture.latent:
        block["partial_rotary_factor"] = dim / head_dim
    context, sizes = _integer(metadata["context_length"]), _sizes(architecture)
    config: dict[str, Any] = {
        "model_type": kind,
        "architectures": [architecture.class_name],
        "vocab_size": rows,
        "hidden_size": embed,
        "intermediate_size": _integer(metadata.get("feed_forward_length", 0), sizes),
        "num_hidden_layers": _integer(metadata["block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": _integer(metadata.get("attention.head_count_kv", heads), sizes),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rope_parameters": block,
        "tie_word_embeddings": "output.weight" not in names,
        "sliding_window": None,
    }
    epsilons = (("layer_norm_rms_epsilon", "rms_norm_eps"), ("layer_norm_epsilon", "layer_norm_eps"))
    for key, field in epsilons:
        if f"attention.{key}" in metadata:
            config[field] = metadata[f"attention.{key}"]
    if metadata.get("embedding_length_per_layer_input"):
        config["vocab_size_per_layer_input"] = rows
    if experts := metadata.get("expert_count"):
        name = "num_local_experts" if kind == "mixtral" else "num_experts"
        config |= {name: experts, "num_experts_per_tok": metadata["expert_used_count"]}
    config |= _biases(kind, names) | architecture.read({**metadata, "vocab_size": rows})
    config = {name: value for name, value in config.items() if name not in architecture.without}
    if (local := config.pop("rope_local_base_freq", None)) is not None:
        sliding = {"rope_type": "default", "rope_theta": local}
        config["rope_parameters"] = {"full_attention": block, "sliding_attention": sliding}
    return config


def _sizes(architecture: Architecture) -> Counted:
    """Names the layers whose number, of those that files have for every layer, is that of the config."""
    if architecture.uneven:
        return "first"
    return "some" if architecture.marked_layers else "all"


def _integer(value: Any, layers: Counted = "all") -> int:
    """A number, or that of all layers, of those for which it is not zero, or of the first."""
    if isinstance(value, list):
        value = [number for number in value if number] or [0] if layers == "some" else value
        if len(set(value)) != 1 and layers != "first":
            raise ValueError("layers differ in their numbers of heads or in their widths")
        value = value[0]
    return int(value)


def _biases(kind: str, names: Collection[str]) -> dict[str, bool]:
    """The switches of biases, by the tensors that there are."""
    attention, network = "blk.0.attn_q.bias" in names, "blk.0.ffn_up.bias" in names
    switches = {
        "llama": {"attention_bias": attention, "mlp_bias": network},
        "smollm3": {"attention_bias": attention, "mlp_bias": network},
        "granite": {"attention_bias": attention, "mlp_bias": network},
        "qwen2_moe": {"qkv_bias": attention},
        "glm": {"attention_bias": attention},
        "glm4": {"attention_bias": attention},
        "glm4_moe": {"attention_bias": attention, "use_qk_norm": "blk.0.attn_q_norm.weight" in names},
        "gemma4_text": {"attention_k_eq_v": _keys_are_values(names)},
    }
    return switches.get(kind, {})


def _keys_are_values(names: Collection[str]) -> bool:
    keys = [name for name in names if name.endswith(".attn_k.weight")]
    return any(name.replace("attn_k", "attn_v") not in names for name in keys)


def _alike(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value and len(set(value)) == 1 else value


def _agree(value: Any, again: Any) -> bool:
    """Whether two values, or lists of them, are equal but for the rounding of numbers."""
    if isinstance(value, list) and isinstance(again, list):
        return len(value) == len(again) and all(map(_agree, value, again))
    if isinstance(value, int | float) and isinstance(again, int | float):
        return math.isclose(value, again, rel_tol=1e-5, abs_tol=1e-12)
    return value == again


def _check(config: dict[str, Any], architecture: str, metadata: Metadata, where: str) -> None:
    """Raises UserError for a key of the file that the config would be written with another value of, or without."""
    written = gguf_layout(model_spec(dict(config), where=where)).metadata
    for key, value in metadata.items():
        if key in HARMLESS or value in (0, 0.0, False, "none"):
            continue
        again = written.get(f"{architecture}.{key}")
        value, again = _alike(value), _alike(again)
        if not _agree(value, again):
            raise UserError(
                f"{architecture}.{key} is {str(value)[:80]} in the file, which Meshtune does not compute"
                + ("" if again is None else f" (its model would have {again})"),
                where=where,
                fix="give the model as safetensors",
            )
