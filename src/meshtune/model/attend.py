"""What mixers that attend share: the call of the attention kernels, and what they recall of earlier tokens."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from meshtune.kernels.attention import attention
from meshtune.model.cache import LayerCache
from meshtune.model.compute import Compute
from meshtune.model.inputs import Rows

MOST_CHUNKS = 1 << 16  # of a document, where attention is chunked: segments are counted in int32

# The positions and segments [B, S] of the tokens that are attended to.
Past = tuple[Int[Array, "B S"], Int[Array, "B S"]]


def attend(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B S K h"],
    v: Float[Array, "B S K h"],
    rows: Rows,
    past: Past | None,
    compute: Compute,
    *,
    chunk: int | None = None,
    **scores: Any,
) -> Float[Array, "B T H h"]:
    """Attention of the tokens `rows` to those of `past`, None for themselves.

    With `chunk` a token sees only its own part of its document, each of that many tokens. `scores` are arguments of the
    kernels: scale, window, softcap, slopes, sinks.
    """
    kv_positions, kv_segments = (rows.positions, rows.segment_ids) if past is None else past
    return attention(
        q,
        k.astype(q.dtype),
        v.astype(q.dtype),
        q_positions=rows.positions,
        kv_positions=kv_positions,
        q_segments=_parts(rows.positions, rows.segment_ids, chunk),
        kv_segments=_parts(kv_positions, kv_segments, chunk),
        backend=compute.attention,
        aligned=past is None,
        sharding=None if compute.layout is None else compute.layout.attention_sharding(),
        platform=compute.platform,
        chip=compute.chip,
        packed=compute.packed or chunk is not None,
        **scores,
    )


def recalled(
    cache: LayerCache, new: dict[str, Array], rows: Rows, reach: int | None
) -> tuple[dict[str, Array], Past, LayerCache]:
    """(arrays of all tokens that the new ones may see, their positions and segments, the next cache)."""
    past_arrays, positions, following = cache.recall(new, rows.positions, rows.segment_ids > 0, reach)
    return past_arrays, (jnp.maximum(positions, 0), (positions >= 0).astype(jnp.int32)), following


def _parts(positions: Array, segments: Array, chunk: int | None) -> Array:
    """Segments, with every chunk of a document as one of its own."""
    if chunk is None:
        return segments
    return jnp.where(segments > 0, segments * MOST_CHUNKS + positions // chunk, 0)
