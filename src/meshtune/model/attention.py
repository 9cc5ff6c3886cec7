"""Grouped-query self-attention with rotary positions, for whole rows and for decoding over a cache."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from meshtune.arrays.tree import Tree
from meshtune.kernels.attention import attention
from meshtune.model.compute import Compute
from meshtune.model.linear import linear, site_key
from meshtune.model.norm import rms_norm
from meshtune.model.rope import rotate
from meshtune.model.spec import LayerSpec, ModelSpec

# What a rematerialisation policy may keep: queries and keys, rotated.
ROTATED = "rotated"


@dataclasses.dataclass(frozen=True)
class Rows:
    """What a layer must know of its tokens. `cos`, `sin` are float32 [B, T, h/2], None where nothing is rotated; the
    rest int32 [B, T]."""

    cos: Float[Array, "B T half"] | None
    sin: Float[Array, "B T half"] | None
    positions: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]


def queries_keys_values(
    x: Float[Array, "B T D"], node: Tree, spec: ModelSpec, rows: Rows, key: Array | None
) -> tuple[Float[Array, "B T H h"], Float[Array, "B T K h"], Float[Array, "B T K h"]]:
    """Projected, normalised where the family does, and rotated."""
    if spec.packed_qkv:
        q, k, v = _packed(x, node, spec, key)
        return _rotated(q, node, "q", spec, rows), _rotated(k, node, "k", spec, rows), v
    return queries(x, node, spec, rows, key), *keys_values(x, node, spec, rows, key)


def queries(
    x: Float[Array, "B T D"], node: Tree, spec: ModelSpec, rows: Rows, key: Array | None
) -> Float[Array, "B T H h"]:
    if spec.packed_qkv:
        return _rotated(_packed(x, node, spec, key)[0], node, "q", spec, rows)
    return _rotated(_heads(x, node, "q", spec, key), node, "q", spec, rows)


def keys_values(
    x: Float[Array, "B T D"], node: Tree, spec: ModelSpec, rows: Rows, key: Array | None
) -> tuple[Float[Array, "B T K h"], Float[Array, "B T K h"]]:
    if spec.packed_qkv:
        _, k, v = _packed(x, node, spec, key)
        return _rotated(k, node, "k", spec, rows), v
    return _rotated(_heads(x, node, "k", spec, key), node, "k", spec, rows), _heads(x, node, "v", spec, key)


def _heads(x: Float[Array, "B T D"], node: Tree, name: str, spec: ModelSpec, key: Array | None) -> Array:
    return linear(x, node[name], site_key(key, name)).reshape(*x.shape[:2], -1, spec.head_dim)


def _packed(x: Float[Array, "B T D"], node: Tree, spec: ModelSpec, key: Array | None) -> tuple[Array, Array, Array]:
    """q, k and v [B, T, H, h], not rotated, of one projection."""
    made = linear(x, node["qkv"], site_key(key, "qkv")).reshape(*x.shape[:2], -1, 3, spec.head_dim)
    return made[:, :, :, 0], made[:, :, :, 1], made[:, :, :, 2]


def _rotated(heads: Array, node: Tree, name: str, spec: ModelSpec, rows: Rows) -> Array:
    if spec.qk_norm:
        heads = rms_norm(heads, node[f"{name}_norm"]["weight"], spec.norm_eps)
    if rows.cos is not None and rows.sin is not None:
        heads = rotate(heads, rows.cos, rows.sin)
    return checkpoint_name(heads, ROTATED)


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
        packed=compute.packed,
        slopes=None if spec.alibi is None else jnp.asarray(spec.alibi.slopes, jnp.float32),
    )
    return linear(mixed.reshape(*mixed.shape[:2], -1), node["o"], site_key(key, "o"))
