"""Gemma 1 to 3: windows in an order, and scores scaled by a number, that llama.cpp knows by the number of layers."""

from __future__ import annotations

from typing import Any

from meshtune.families.gguf.architecture import WINDOW, Architecture, Metadata, attention, integer, layer_windows
from meshtune.model.spec import ModelSpec


def _gemma_softcaps(spec: ModelSpec) -> dict[str, Any]:
    fields = {"attn_logit_softcapping": attention(spec).softcap, "final_logit_softcapping": spec.logit_softcap}
    return {name: value for name, value in fields.items() if value is not None}


def _gemma2_write(spec: ModelSpec) -> dict[str, Any]:
    return _gemma_softcaps(spec) | {WINDOW: longest_window(spec)}


def _gemma2_read(metadata: Metadata) -> dict[str, Any]:
    head_dim, layers = metadata["attention.key_length"], metadata["block_count"]
    # llama.cpp divides the 27B's scores by the hidden size over the number of heads, those of others by the head's.
    per_head = integer(metadata, "embedding_length") // integer(metadata, "attention.head_count")
    return {
        "query_pre_attn_scalar": per_head if layers == 46 else head_dim,
        "attn_logit_softcapping": metadata.get("attn_logit_softcapping"),
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
        "sliding_window": metadata[WINDOW],
    }


def _gemma_scale(largest: int, hidden: ModelSpec) -> float:
    mixer = attention(hidden)
    return (hidden.embed // mixer.heads if hidden.layers == largest else mixer.head_dim) ** -0.5


def _gemma_refusal(largest: int, pattern: int):
    def refusal(spec: ModelSpec) -> str | None:
        scale = attention(spec).scale
        if scale is not None and abs(scale - _gemma_scale(largest, spec)) > 1e-6:
            return "query_pre_attn_scalar: llama.cpp chooses it by the number of layers"
        expected = [None if (number + 1) % pattern == 0 else longest_window(spec) for number in range(spec.layers)]
        return None if layer_windows(spec) == expected else "layer_types: llama.cpp has another order of windows"

    return refusal


def _gemma3_write(spec: ModelSpec) -> dict[str, Any]:
    local = next((rope.theta for rope in spec.ropes if rope != attention(spec).rope), None)
    return {
        WINDOW: longest_window(spec),
        "rope.freq_base_swa": local if local is not None else 10000.0,
    } | _gemma_softcaps(spec)


def _gemma3_read(metadata: Metadata) -> dict[str, Any]:
    head_dim, layers = metadata["attention.key_length"], metadata["block_count"]
    per_head = integer(metadata, "embedding_length") // integer(metadata, "attention.head_count")
    return {
        "query_pre_attn_scalar": per_head if layers == 62 else head_dim,
        "sliding_window": metadata[WINDOW],
        "sliding_window_pattern": 6,
        "rope_local_base_freq": metadata.get("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
    }


def longest_window(spec: ModelSpec) -> int:
    """The sliding window of the layers that have one; where none has, the context."""
    return next((window for window in layer_windows(spec) if window is not None), spec.max_length)


GEMMA: dict[str, Architecture] = {
    "gemma": Architecture("gemma", "GemmaForCausalLM", head="embedding", activation="gelu_tanh"),
    "gemma2": Architecture(
        "gemma2",
        "Gemma2ForCausalLM",
        head="embedding",
        activation="gelu_tanh",
        own_scale=True,
        windows=True,
        refusal=_gemma_refusal(46, 2),
        write=_gemma2_write,
        read=_gemma2_read,
    ),
    "gemma3_text": Architecture(
        "gemma3",
        "Gemma3ForCausalLM",
        activation="gelu_tanh",
        own_scale=True,
        several_ropes=True,
        windows=True,
        refusal=_gemma_refusal(62, 6),
        write=_gemma3_write,
        read=_gemma3_read,
    ),
}
