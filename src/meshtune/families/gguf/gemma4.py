"""Gemma 4 in llama.cpp: two kinds of attention of different sizes, per-layer embeddings, experts beside a network."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshtune.families.gguf.architecture import (
    WINDOW,
    Architecture,
    Metadata,
    attention,
    attentions,
    by_layer,
    experts,
    integer,
    layer_heads,
    layer_windows,
)
from meshtune.model.attention import AttentionSpec
from meshtune.model.experts import ExpertsSpec
from meshtune.model.layer_extras import PerLayerEmbedding
from meshtune.model.mlp import MlpSpec
from meshtune.model.spec import ModelSpec

PATTERN, SHARED = "attention.sliding_window_pattern", "attention.shared_kv_layers"
PER_LAYER = "embedding_length_per_layer_input"


def readers(spec: ModelSpec) -> list[bool]:
    """Whether each layer reads the keys and values of another."""
    return by_layer(spec, lambda layer: isinstance(layer.mixer, AttentionSpec) and layer.mixer.reads is not None)


def _network(ffn: Any) -> MlpSpec:
    ffn = ffn.shared if isinstance(ffn, ExpertsSpec) else ffn
    assert isinstance(ffn, MlpSpec)
    return ffn


def _refusal(spec: ModelSpec) -> str | None:
    if not any(mixer.window for mixer in attentions(spec)) or attention(spec).window is not None:
        return "layers of one kind of attention alone"
    return None


def _write(spec: ModelSpec) -> dict[str, Any]:
    sliding = next(mixer for mixer in attentions(spec) if mixer.window is not None)
    assert sliding.rope is not None
    widths = by_layer(spec, lambda layer: _network(layer.ffn).width)
    return {
        "attention.head_count_kv": layer_heads(spec),
        "attention.key_length_swa": sliding.head_dim,
        "attention.value_length_swa": sliding.head_dim,
        WINDOW: sliding.window,
        PATTERN: [number is not None for number in layer_windows(spec)],
        SHARED: readers(spec).count(True),
        "feed_forward_length": widths,
        PER_LAYER: spec.side.width if isinstance(spec.side, PerLayerEmbedding) else 0,
        "rope.freq_base_swa": sliding.rope.theta,
        "rope.dimension_count_swa": sliding.rope.dim,
        "final_logit_softcapping": spec.logit_softcap,
    }


def _names(spec: ModelSpec) -> dict[str, str]:
    if experts(spec) is None:
        return {}
    return {f"mlp/shared/{name}": f"ffn_{name}" for name in ("gate", "up", "down")}


def _read(metadata: Metadata) -> dict[str, Any]:
    layers = integer(metadata, "block_count")
    sliding, heads, widths = (
        value if isinstance(value, list) else [value] * layers
        for value in (metadata[PATTERN], metadata["attention.head_count_kv"], metadata["feed_forward_length"])
    )
    full = sliding.index(False)
    fields: dict[str, Any] = {
        "layer_types": ["sliding_attention" if window else "full_attention" for window in sliding],
        "head_dim": metadata["attention.key_length_swa"],
        "global_head_dim": metadata["attention.key_length"],
        "num_key_value_heads": heads[sliding.index(True)],
        "num_global_key_value_heads": heads[full],
        "intermediate_size": widths[0],
        "use_double_wide_mlp": len(set(widths)) > 1,
        "num_kv_shared_layers": metadata.get(SHARED, 0),
        "hidden_size_per_layer_input": metadata.get(PER_LAYER, 0),
        "sliding_window": metadata[WINDOW],
        "rope_local_base_freq": metadata.get("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
        "enable_moe_block": "expert_count" in metadata,
    }
    if "expert_count" in metadata:
        fields |= {
            "top_k_experts": metadata["expert_used_count"],
            "moe_intermediate_size": metadata["expert_feed_forward_length"],
        }
    return fields


TEXT = Architecture(
    "gemma4",
    "Gemma4ForCausalLM",
    activation="gelu_tanh",
    windows=True,
    several_ropes=True,
    own_scale=True,
    own_routing=True,
    uneven=True,
    named=_names,
    refusal=_refusal,
    write=_write,
    read=_read,
    without=("num_experts_per_tok",),
)
GEMMA4: dict[str, Architecture] = {
    "gemma4_text": TEXT,
    "gemma4_unified_text": dataclasses.replace(TEXT, class_name="Gemma4UnifiedForCausalLM"),
}
