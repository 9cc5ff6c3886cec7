"""Baichuan and Baichuan2, whose positions llama.cpp chooses by the number of layers: 7B rotary, 13B by distance."""

from __future__ import annotations

from typing import Any

from meshtune.families.baichuan import ARCHITECTURE, FIRST_7B, FIRST_VOCABULARY
from meshtune.families.gguf.architecture import Architecture, Metadata, attention, integer
from meshtune.model.spec import ModelSpec

ROTARY_LAYERS, ALIBI_LAYERS = 32, 40


def _refusal(spec: ModelSpec) -> str | None:
    rotary = attention(spec).rope is not None
    layers, positions = (ROTARY_LAYERS, "rotary positions") if rotary else (ALIBI_LAYERS, "biases by distance (ALiBi)")
    if spec.layers == layers:
        return None
    return f"llama.cpp knows {positions} by a depth of {layers} layers, and it has {spec.layers}"


def _read(metadata: Metadata) -> dict[str, Any]:
    if integer(metadata, "block_count") == ALIBI_LAYERS:
        # That a config has no max_position_embeddings says that positions are biases.
        return {"max_position_embeddings": None, "model_max_length": integer(metadata, "context_length")}
    first = integer(metadata, "vocab_size") == FIRST_VOCABULARY
    return {"architectures": [FIRST_7B if first else ARCHITECTURE]}


BAICHUAN = Architecture(
    "baichuan",
    ARCHITECTURE,
    permuted=True,
    parted_qkv=True,
    refusal=_refusal,
    read=_read,
    without=("rope_parameters", "sliding_window", "num_key_value_heads", "head_dim"),
)
