"""Gemma 1 to 4 and 3n: llama.cpp knows their windows and scales by the number of layers, and sizes as constants."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

from meshtune.families.gguf.architecture import (
    WINDOW,
    Architecture,
    Metadata,
    attention,
    attentions,
    by_layer,
    first_window,
    integer,
    layer_heads,
    layer_windows,
    windows_refusal,
)
from meshtune.model.attention import AttentionSpec
from meshtune.model.experts import ExpertsSpec
from meshtune.model.layer_extras import PerLayerEmbedding
from meshtune.model.mlp import MlpSpec
from meshtune.model.spec import ModelSpec

LAYERS_27B = {"gemma2": 46, "gemma3": 62}  # of the models whose scores are scaled by the hidden size over the heads
PATTERN, SHARED = "attention.sliding_window_pattern", "attention.shared_kv_layers"
PER_LAYER = "embedding_length_per_layer_input"
SOFTCAP, SOFTCAP_SCORES = "final_logit_softcapping", "attn_logit_softcapping"
LOCAL_BASE = "rope.freq_base_swa"
# Constants of llama.cpp for Gemma 3n.
PERIOD = 5  # of layers, of which the last has no window
OWN_MEMORY = 20  # first layers that have keys and values of their own
STREAMS, RANK, WIDTH = 4, 64, 256
SPARSE_LAYERS, SPARSITY = 10, 0.95
SOFTCAP_3N = 30.0


def _softcaps(spec: ModelSpec) -> dict[str, Any]:
    return {SOFTCAP_SCORES: attention(spec).softcap, SOFTCAP: spec.logit_softcap}


def _window(spec: ModelSpec) -> int:
    """The sliding window of the layers that have one; where none has, the context."""
    window = first_window(spec)
    return spec.max_length if window is None else window


def _refusal(name: str, period: int) -> Callable[[ModelSpec], str | None]:
    def refusal(spec: ModelSpec) -> str | None:
        mixer = attention(spec)
        width = spec.embed // mixer.heads if spec.layers == LAYERS_27B[name] else mixer.head_dim
        if mixer.scale is not None and abs(mixer.scale - width**-0.5) > 1e-6:
            return "query_pre_attn_scalar: llama.cpp chooses it by the number of layers"
        return windows_refusal(spec, period)

    return refusal


def _scalar(metadata: Metadata, name: str) -> Any:
    """The query_pre_attn_scalar: the hidden size over the number of heads of the 27B models, of others a head's."""
    if metadata["block_count"] != LAYERS_27B[name]:
        return metadata["attention.key_length"]
    return integer(metadata, "embedding_length") // integer(metadata, "attention.head_count")


def _gemma2_write(spec: ModelSpec) -> dict[str, Any]:
    return _softcaps(spec) | {WINDOW: _window(spec)}


def _gemma2_read(metadata: Metadata) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _scalar(metadata, "gemma2"),
        SOFTCAP_SCORES: metadata.get(SOFTCAP_SCORES),
        SOFTCAP: metadata.get(SOFTCAP),
        "sliding_window": metadata[WINDOW],
    }


def _gemma3_write(spec: ModelSpec) -> dict[str, Any]:
    local = next((rope.theta for rope in spec.ropes if rope != attention(spec).rope), 10000.0)
    return {WINDOW: _window(spec), LOCAL_BASE: local} | _softcaps(spec)


def _gemma3_read(metadata: Metadata) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _scalar(metadata, "gemma3"),
        "sliding_window": metadata[WINDOW],
        "sliding_window_pattern": 6,
        "rope_local_base_freq": metadata.get(LOCAL_BASE, 10000.0),
        SOFTCAP: metadata.get(SOFTCAP),
    }


def _sliding(spec: ModelSpec) -> AttentionSpec:
    return next(mixer for mixer in attentions(spec) if mixer.window is not None)


def _readers(spec: ModelSpec) -> list[bool]:
    """Whether each layer reads the keys and values of another."""
    return by_layer(spec, lambda layer: isinstance(layer.mixer, AttentionSpec) and layer.mixer.reads is not None)


def _windowed_metadata(spec: ModelSpec) -> dict[str, Any]:
    """The keys of Gemma 3n and 4 for layers with windows, and for those that read the memory of others."""
    sliding = _sliding(spec)
    assert sliding.rope is not None
    return {
        WINDOW: sliding.window,
        PATTERN: [window is not None for window in layer_windows(spec)],
        SHARED: _readers(spec).count(True),
        PER_LAYER: spec.side.width if isinstance(spec.side, PerLayerEmbedding) else 0,
        LOCAL_BASE: sliding.rope.theta,
    }


def _gemma3n_refusal(spec: ModelSpec) -> str | None:
    extras, side = spec.layer_kinds[0].extras, spec.side
    mlps = [mlp for mlp in by_layer(spec, lambda layer: layer.ffn) if isinstance(mlp, MlpSpec)]
    assert extras is not None
    assert extras.streams is not None
    assert extras.laurel is not None
    assert isinstance(side, PerLayerEmbedding)
    sizes = {
        "altup_num_inputs": (extras.streams.count, STREAMS),
        "altup_active_idx": (extras.streams.active, 0),
        "altup_correct_scale": (extras.streams.scaled, True),
        "laurel_rank": (extras.laurel.rank, RANK),
        "hidden_size_per_layer_input": (side.width, WIDTH),
        SOFTCAP: (spec.logit_softcap, SOFTCAP_3N),
        "num_kv_shared_layers": (_readers(spec).count(True), max(0, spec.layers - OWN_MEMORY)),
    }
    for field, (number, constant) in sizes.items():
        if number != constant:
            return f"{field} is {number}, and llama.cpp computes {constant}"
    if first_window(spec) is None or windows_refusal(spec, PERIOD):
        return f"layer_types: llama.cpp has full attention in every {PERIOD}th layer, and windows in all others"
    if len({mlp.width for mlp in mlps}) > 1:
        return "intermediate_size: layers of different widths"
    if [mlp.sparsity or 0.0 for mlp in mlps] != _sparsities(spec.layers):
        return f"activation_sparsity_pattern: llama.cpp has {SPARSITY:g} in the first {SPARSE_LAYERS} layers only"
    rope = attention(spec).rope
    if rope is None or rope.kind not in ("default", "linear"):
        return "rope_parameters of full attention that are neither plain nor linear"
    return None


def _sparsities(layers: int) -> list[float]:
    return [SPARSITY if number < SPARSE_LAYERS else 0.0 for number in range(layers)]


def _gemma3n_write(spec: ModelSpec) -> dict[str, Any]:
    normal = statistics.NormalDist()
    return _windowed_metadata(spec) | {
        SOFTCAP: spec.logit_softcap,
        "altup.active_idx": 0,
        "altup.num_inputs": STREAMS,
        # In deviations of a layer's inputs from their mean.
        "activation_sparsity_scale": [
            normal.inv_cdf(share) if share else float("-inf") for share in _sparsities(spec.layers)
        ],
    }


def _gemma3n_read(metadata: Metadata) -> dict[str, Any]:
    layers = integer(metadata, "block_count")
    return {
        "layer_types": ["sliding_attention" if (number + 1) % PERIOD else "full_attention" for number in range(layers)],
        "sliding_window": metadata[WINDOW],
        "rope_local_base_freq": metadata.get(LOCAL_BASE, 10000.0),
        "num_kv_shared_layers": max(0, layers - OWN_MEMORY),
        "hidden_size_per_layer_input": metadata[PER_LAYER],
        SOFTCAP: metadata.get(SOFTCAP, SOFTCAP_3N),
        "activation_sparsity_pattern": _sparsities(layers),
        "altup_num_inputs": STREAMS,
        "altup_coef_clip": None,  # coefficients are limited in the file
        "laurel_rank": RANK,
    }


def _gemma3n_unused(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Keys and values of layers that read those of others."""
    mixer = attention(spec)
    rows = (mixer.kv_heads * mixer.head_dim, spec.embed)
    shapes = {"attn_k": rows, "attn_v": rows, "attn_k_norm": (mixer.head_dim,)}
    return {
        f"blk.{number}.{name}.weight": shape
        for number, reads in enumerate(_readers(spec))
        if reads
        for name, shape in shapes.items()
    }


def _gemma4_refusal(spec: ModelSpec) -> str | None:
    if not any(mixer.window for mixer in attentions(spec)) or attention(spec).window is not None:
        return "layers of one kind of attention only"
    return None


def _gemma4_write(spec: ModelSpec) -> dict[str, Any]:
    sliding = _sliding(spec)
    assert sliding.rope is not None
    return {
        "attention.head_count_kv": layer_heads(spec),
        "attention.key_length_swa": sliding.head_dim,
        "attention.value_length_swa": sliding.head_dim,
        **_windowed_metadata(spec),
        "feed_forward_length": by_layer(spec, lambda layer: _network(layer.ffn).width),
        "rope.dimension_count_swa": sliding.rope.dim,
        SOFTCAP: spec.logit_softcap,
    }


def _network(ffn: Any) -> MlpSpec:
    ffn = ffn.shared if isinstance(ffn, ExpertsSpec) else ffn
    assert isinstance(ffn, MlpSpec)
    return ffn


def _gemma4_read(metadata: Metadata) -> dict[str, Any]:
    layers = integer(metadata, "block_count")
    sliding, heads, widths = (
        value if isinstance(value, list) else [value] * layers
        for value in (metadata[PATTERN], metadata["attention.head_count_kv"], metadata["feed_forward_length"])
    )
    fields: dict[str, Any] = {
        "layer_types": ["sliding_attention" if window else "full_attention" for window in sliding],
        "head_dim": metadata["attention.key_length_swa"],
        "global_head_dim": metadata["attention.key_length"],
        "num_key_value_heads": heads[sliding.index(True)],
        "num_global_key_value_heads": heads[sliding.index(False)],
        "intermediate_size": widths[0],
        "use_double_wide_mlp": len(set(widths)) > 1,
        "num_kv_shared_layers": metadata.get(SHARED, 0),
        "hidden_size_per_layer_input": metadata.get(PER_LAYER, 0),
        "sliding_window": metadata[WINDOW],
        "rope_local_base_freq": metadata.get(LOCAL_BASE, 10000.0),
        SOFTCAP: metadata.get(SOFTCAP),
        "enable_moe_block": "expert_count" in metadata,
    }
    if "expert_count" in metadata:
        fields["top_k_experts"] = metadata["expert_used_count"]
        fields["moe_intermediate_size"] = metadata["expert_feed_forward_length"]
    return fields


GEMMA2 = Architecture(
    "gemma2",
    "Gemma2ForCausalLM",
    head="embedding",
    activation="gelu_tanh",
    own_scale=True,
    windows=True,
    refusal=_refusal("gemma2", 2),
    write=_gemma2_write,
    read=_gemma2_read,
)
GEMMA3N = Architecture(
    "gemma3n",
    "Gemma3nForCausalLM",
    activation="gelu_tanh",
    windows=True,
    several_ropes=True,
    own_scale=True,
    refusal=_gemma3n_refusal,
    write=_gemma3n_write,
    read=_gemma3n_read,
    unused=_gemma3n_unused,
)
GEMMA4 = Architecture(
    "gemma4",
    "Gemma4ForCausalLM",
    activation="gelu_tanh",
    windows=True,
    several_ropes=True,
    own_scale=True,
    own_routing=True,
    uneven=True,
    refusal=_gemma4_refusal,
    write=_gemma4_write,
    read=_gemma4_read,
    without=("num_experts_per_tok",),
)
GEMMA: dict[str, Architecture] = {
    "gemma": Architecture("gemma", "GemmaForCausalLM", head="embedding", activation="gelu_tanh"),
    "gemma2": GEMMA2,
    "gemma3_text": Architecture(
        "gemma3",
        "Gemma3ForCausalLM",
        activation="gelu_tanh",
        own_scale=True,
        several_ropes=True,
        windows=True,
        refusal=_refusal("gemma3", 6),
        write=_gemma3_write,
        read=_gemma3_read,
    ),
    "gemma3n_text": GEMMA3N,
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": dataclasses.replace(GEMMA4, class_name="Gemma4UnifiedForCausalLM"),
}
