"""Grouped-query self-attention with rotary positions, for whole rows and for decoding over a cache."""

from __future__ import annotations

import dataclasses

from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from meshtune.kernels.attention import attention
from meshtune.model.compute import Compute
from meshtune.model.linear import linear, site_key
from meshtune.model.norm import rms_norm
from meshtune.model.rope import rotate
from meshtune.model.spec import LayerSpec, ModelSpec
from meshtune.model.tree import Tree

# What a rematerialisation policy may keep: queries and keys, rotated.
ROTATED = "rotated"


@dataclasses.dataclass(frozen=True)
class Rows:
    """What a layer must know of its tokens. `cos`, `sin` are float32 [B, T, h/2], the rest int32 [B, T]."""

    cos: Float[Array, "B T half"]
    sin: Float[Array, "B T half"]
    positions: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]


def queries_keys_values(
    x: Float[Array, "B T D"], node: Tree, spec: ModelSpec, rows: Rows, key: Array | None
) -> tuple[Float[Array, "B T H h"], Float[Array, "B T K h"], Float[Array, "B T K h"]]:
    """Projected, normalised where the family does, and rotated."""

    def heads(name: str, count: int) -> Float[Array, "B T N h"]:
        return linear(x, node[name], site_key(key, name)).reshape(*x.shape[:2], count, spec.head_dim)

    q, k, v = heads("q", spec.heads), heads("k", spec.kv_heads), heads("v", spec.kv_heads)
    if spec.qk_norm:
        q = rms_norm(q, node["q_norm"]["weight"], spec.norm_eps)
        k = rms_norm(k, node["k_norm"]["weight"], spec.norm_eps)
    q, k = (checkpoint_name(rotate(x, rows.cos, rows.sin), ROTATED) for x in (q, k))
    return q, k, v


def attend(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B S K h"],
    v: Float[Array, "B S K h"],
    node: Tree,
    spec: ModelSpec,
    layer: LayerSpec,
    compute: Compute,
    rows: Rows,
    past: tuple[Int[Array, "B S"], Int[Array, "B S"]] | None,
    key: Array | None,
) -> Float[Array, "B T D"]:
    """Attention and its output projection. `past` holds positions and segments of k and v where they are a cache."""
    kv_positions, kv_segments = (rows.positions, rows.segment_ids) if past is None else past
    mixed = attention(
        q,
        k,
        v,
        q_positions=rows.positions,
        kv_positions=kv_positions,
        q_segments=rows.segment_ids,
        kv_segments=kv_segments,
        scale=spec.head_dim**-0.5,
        window=layer.window,
        backend=compute.attention,
        aligned=past is None,
        split=None if compute.layout is None else compute.layout.attention_split(),
        platform=compute.platform,
        chip=compute.chip,
    )
    return linear(mixed.reshape(*mixed.shape[:2], -1), node["o"], site_key(key, "o"))
