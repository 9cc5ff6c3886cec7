"""Gemma 3n in llama.cpp, which has most of the published models' sizes as constants."""

from __future__ import annotations

import statistics
from typing import Any

from meshtune.families.gguf.architecture import (
    WINDOW,
    Architecture,
    Metadata,
    attention,
    attentions,
    by_layer,
    integer,
    layer_windows,
)
from meshtune.families.gguf.gemma4 import PATTERN, PER_LAYER, SHARED, readers
from meshtune.families.gguf.windowed import other_windows, window
from meshtune.model.layer_extras import PerLayerEmbedding
from meshtune.model.mlp import MlpSpec
from meshtune.model.spec import ModelSpec

PERIOD = 5  # of layers, of which the last has no window
OWN_MEMORY = 20  # first layers that have keys and values of their own
STREAMS, RANK, WIDTH = 4, 64, 256
SPARSE_LAYERS, SPARSITY = 10, 0.95
SOFTCAP = 30.0


def _shares(layers: int) -> list[float]:
    """The sparsity of every layer."""
    return [SPARSITY if number < SPARSE_LAYERS else 0.0 for number in range(layers)]


def _refusal(spec: ModelSpec) -> str | None:
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
        "final_logit_softcapping": (spec.logit_softcap, SOFTCAP),
        "num_kv_shared_layers": (readers(spec).count(True), max(0, spec.layers - OWN_MEMORY)),
    }
    for field, (number, constant) in sizes.items():
        if number != constant:
            return f"{field} is {number}, and llama.cpp computes {constant}"
    if window(spec) is None or other_windows(spec, PERIOD):
        return f"layer_types: llama.cpp has full attention in every {PERIOD}th layer, and windows in all others"
    if len({mlp.width for mlp in mlps}) > 1:
        return "intermediate_size: layers of different widths"
    if [mlp.sparsity or 0.0 for mlp in mlps] != _shares(spec.layers):
        return f"activation_sparsity_pattern: llama.cpp has {SPARSITY:g} in the first {SPARSE_LAYERS} layers alone"
    rope = attention(spec).rope
    if rope is None or rope.kind not in ("default", "linear"):
        return "rope_parameters of full attention that are neither plain nor linear"
    return None


def _write(spec: ModelSpec) -> dict[str, Any]:
    sliding = next(mixer for mixer in attentions(spec) if mixer.window is not None)
    assert sliding.rope is not None
    normal = statistics.NormalDist()
    return {
        WINDOW: sliding.window,
        PATTERN: [window is not None for window in layer_windows(spec)],
        SHARED: readers(spec).count(True),
        PER_LAYER: WIDTH,
        "rope.freq_base_swa": sliding.rope.theta,
        "final_logit_softcapping": spec.logit_softcap,
        "altup.active_idx": 0,
        "altup.num_inputs": STREAMS,
        # In deviations of a layer's inputs from their mean.
        "activation_sparsity_scale": [
            normal.inv_cdf(share) if share else float("-inf") for share in _shares(spec.layers)
        ],
    }


def _read(metadata: Metadata) -> dict[str, Any]:
    layers = integer(metadata, "block_count")
    return {
        "layer_types": ["sliding_attention" if (number + 1) % PERIOD else "full_attention" for number in range(layers)],
        "sliding_window": metadata[WINDOW],
        "rope_local_base_freq": metadata.get("rope.freq_base_swa", 10000.0),
        "num_kv_shared_layers": max(0, layers - OWN_MEMORY),
        "hidden_size_per_layer_input": metadata[PER_LAYER],
        "final_logit_softcapping": metadata.get("final_logit_softcapping", SOFTCAP),
        "activation_sparsity_pattern": _shares(layers),
        "altup_num_inputs": STREAMS,
        "altup_coef_clip": None,  # coefficients are limited in the file
        "laurel_rank": RANK,
    }


def _unused(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Keys and values of layers that read those of others."""
    mixer = attention(spec)
    rows = (mixer.kv_heads * mixer.head_dim, spec.embed)
    shapes = {"attn_k": rows, "attn_v": rows, "attn_k_norm": (mixer.head_dim,)}
    return {
        f"blk.{number}.{name}.weight": shape
        for number, reads in enumerate(readers(spec))
        if reads
        for name, shape in shapes.items()
    }


GEMMA3N: dict[str, Architecture] = {
    "gemma3n_text": Architecture(
        "gemma3n",
        "Gemma3nForCausalLM",
        activation="gelu_tanh",
        windows=True,
        several_ropes=True,
        own_scale=True,
        refusal=_refusal,
        write=_write,
        read=_read,
        unused=_unused,
    )
}
