"""Grouped-query self-attention, for whole rows, for chunks of rows and over a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree
from meshtune.kernels.attention import AttentionRequest, attention
from meshtune.model.block import Activation, Context, Cost, Divisor, Hidden, Output, RowParams, Sums
from meshtune.model.cache import SLOTS, LayerCache
from meshtune.model.compute import Compute
from meshtune.model.inputs import Rows
from meshtune.model.linear import linear, linear_params, site_key
from meshtune.model.norm import NormSpec
from meshtune.model.rope import RopeSpec, rotate

ROTATED = "rotated"  # what a rematerialisation policy may keep: queries and keys, rotated
PACKED = "packed_heads"  # the logical axis of rows of queries, keys and values, head by head

Heads = Float[Array, "B T H h"]


@dataclasses.dataclass(frozen=True)
class AlibiSpec:
    """Attention with linear biases (https://arxiv.org/abs/2108.12409): a score loses its head's slope, one of `slopes`,
    for every position from query back to key."""

    slopes: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Softmax attention of H query heads over K key-value heads of h numbers each.

    Positions are rotary (`rope`), biases (`alibi`) or absent. `window` is the sliding window in tokens (None: the whole
    past), `softcap` squashes scores by tanh, `scale` multiplies them (None: h ** -0.5). `qk_norm` normalises every head
    of queries and keys. With `packed` one projection `qkv` [3 H h, D] computes queries, keys and values: for each head
    its h rows of queries, of keys and of values, so that tp, which splits the rows, gives every device whole heads.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec | None = None
    alibi: AlibiSpec | None = None
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: NormSpec | None = None
    packed: bool = False
    name: ClassVar[str] = "attn"

    def __post_init__(self):
        assert not self.packed or self.heads == self.kv_heads, "packed queries, keys and values are of the same heads"
        assert self.heads % self.kv_heads == 0, "key-value heads must divide the heads"

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        return () if self.rope is None else (self.rope,)

    def params(self, embed: int) -> Tree:
        """q [H h, D], k and v [K h, D] (or qkv), o [D, H h], and the norms of a head of queries and keys."""
        d, H, K = (embed, "embed"), self.heads * self.head_dim, self.kv_heads * self.head_dim
        heads, kv_heads = (H, "heads"), (K, "kv_heads")
        if self.packed:
            tree = {"qkv": linear_params((3 * H, PACKED), d, self.qkv_bias, self.head_dim)}
        else:
            tree = {
                "q": linear_params(heads, d, self.qkv_bias, self.head_dim),
                "k": linear_params(kv_heads, d, self.qkv_bias, self.head_dim),
                "v": linear_params(kv_heads, d, self.qkv_bias),
            }
        tree["o"] = linear_params(d, heads, self.out_bias)
        if self.qk_norm is not None:
            tree |= {n: self.qk_norm.params(self.head_dim, "head_dim") for n in ("q_norm", "k_norm")}
        return tree

    def apply(self, x: Hidden, node: Tree, context: Context, cache: LayerCache | None = None) -> Output:
        """Attention and its output projection."""
        rows = context.rows
        if context.memory is not None:
            q, (memory, memory_rows) = self._queries(x, node, context), context.memory
            k, v, past = memory["k"], memory["v"], (memory_rows.positions, memory_rows.segment_ids)
        elif cache is None:
            q, k, v = self._queries_keys_values(x, node, context)
            past = None
        else:
            q, k, v = self._queries_keys_values(x, node, context)
            k, v, past, cache = self._recalled(k, v, rows, cache)
        kv_positions, kv_segments = (rows.positions, rows.segment_ids) if past is None else past
        compute = context.compute
        mixed = attention(
            q,
            k.astype(q.dtype),
            v.astype(q.dtype),
            q_positions=rows.positions,
            kv_positions=kv_positions,
            q_segments=rows.segment_ids,
            kv_segments=kv_segments,
            backend=compute.attention,
            aligned=past is None,
            sharding=None if compute.layout is None else compute.layout.attention_sharding(),
            platform=compute.platform,
            chip=compute.chip,
            packed=compute.packed,
            slopes=None if self.alibi is None else jnp.asarray(self.alibi.slopes, jnp.float32),
            **self._scores(),
        )
        y = linear(mixed.reshape(*mixed.shape[:2], -1), node["o"], site_key(context.key, "o"))
        return Output(y, cache, {})

    def memory(self, x: Hidden, node: Tree, context: Context) -> Tree:
        """Keys and values [B, T, K, h]."""
        if self.packed:
            _, k, v = self._packed(x, node, context.key)
        else:
            k, v = (self._heads(x, node, name, context.key) for name in ("k", "v"))
        return {"k": self._rotated(k, node, "k", context.rows), "v": v}

    def cache(self, batch: int, slots: int, dtype: str) -> Tree:
        """Keys and values of `slots` tokens a row, or of a window."""
        slots = slots if self.window is None else min(slots, self.window)
        shape = (batch, slots, self.kv_heads, self.head_dim)
        array = ArraySpec(shape, dtype, ("batch", SLOTS, "kv_heads", "head_dim"), "zeros")
        return {"k": array, "v": array}

    def side_inputs(self) -> frozenset[str]:
        return frozenset()

    def sums(self) -> Mapping[str, tuple[int, ...]]:
        return {}

    def loss(self, sums: Sums) -> Array | None:
        return None

    def row_params(self) -> RowParams:
        if self.packed:  # both passes read the one projection, each for its share of the gradient
            memory, chunk = ["qkv", "k_norm"], ["qkv", "q_norm", "o"]
        else:
            memory, chunk = ["k", "v", "k_norm"], ["q", "q_norm", "o"]
        norms = {"q_norm", "k_norm"} if self.qk_norm is None else set()
        return RowParams(frozenset(memory) - norms, frozenset(chunk) - norms)

    def divisors(self) -> tuple[Divisor, ...]:
        kv_heads = Divisor("tp", "key and value heads", self.kv_heads, replicate_axis="kv_heads")
        return Divisor("tp", "attention heads", self.heads), kv_heads

    def cost(self, embed: int) -> Cost:
        H, K = self.heads * self.head_dim, self.kv_heads * self.head_dim
        past = Activation("kv_heads", K, self.kv_heads, kept=True, elementwise=2, whole_rows=True)
        activations = (
            Activation("heads", H, self.heads, kept=True, elementwise=2),
            past,
            past,
            Activation("heads", H, self.heads, kept=True),
            # The log-sum-exp of every head's scores, in float32.
            Activation("heads", self.heads, self.heads, kept=True, products=0, itemsize=4),
        )
        return Cost(embed * (2 * H + 2 * K), activations, pairs=4 * H, window=self.window)

    def attention_request(self, rows: int, q_length: int, kv_length: int, compute: Compute) -> AttentionRequest:
        return AttentionRequest(
            batch=rows,
            q_length=q_length,
            kv_length=kv_length,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=compute.dtype,
            platform=compute.platform or jax.default_backend(),
            chip=compute.chip,
            packed=compute.packed,
            alibi=self.alibi is not None,
            aligned=q_length == kv_length,
            **self._scores(),
        )

    def _scores(self) -> dict[str, Any]:
        """How scores are computed: the same for the kernel that runs and for the request that is asked about."""
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        return {"scale": scale, "window": self.window, "softcap": self.softcap}

    def _queries_keys_values(self, x: Hidden, node: Tree, context: Context) -> tuple[Heads, Heads, Heads]:
        rows, key = context.rows, context.key
        if self.packed:
            q, k, v = self._packed(x, node, key)
            return self._rotated(q, node, "q", rows), self._rotated(k, node, "k", rows), v
        q = self._rotated(self._heads(x, node, "q", key), node, "q", rows)
        k = self._rotated(self._heads(x, node, "k", key), node, "k", rows)
        return q, k, self._heads(x, node, "v", key)

    def _queries(self, x: Hidden, node: Tree, context: Context) -> Heads:
        q = self._packed(x, node, context.key)[0] if self.packed else self._heads(x, node, "q", context.key)
        return self._rotated(q, node, "q", context.rows)

    def _heads(self, x: Hidden, node: Tree, name: str, key: Array | None) -> Heads:
        return linear(x, node[name], site_key(key, name)).reshape(*x.shape[:2], -1, self.head_dim)

    def _packed(self, x: Hidden, node: Tree, key: Array | None) -> tuple[Heads, Heads, Heads]:
        """Queries, keys and values of one projection, not rotated."""
        qkv = linear(x, node["qkv"], site_key(key, "qkv")).reshape(*x.shape[:2], -1, 3, self.head_dim)
        return qkv[:, :, :, 0], qkv[:, :, :, 1], qkv[:, :, :, 2]

    def _rotated(self, heads: Heads, node: Tree, name: str, rows: Rows) -> Heads:
        """Normalised where the model does that, and rotated."""
        if self.qk_norm is not None:
            heads = self.qk_norm(heads, node[f"{name}_norm"])
        if self.rope is not None:
            heads = rotate(heads, *rows.angles[self.rope], interleaved=self.rope.interleaved)
        return checkpoint_name(heads, ROTATED)

    def _recalled(
        self, k: Heads, v: Heads, rows: Rows, cache: LayerCache
    ) -> tuple[Heads, Heads, tuple[Array, Array], LayerCache]:
        """(keys, values, their positions and segments, the next cache) for new tokens that also see the cache."""
        real = rows.segment_ids > 0
        lengths = cache.lengths + jnp.sum(real, axis=1)
        following = cache.write("k", rows.positions, real, k).write("v", rows.positions, real, v)
        slots, length = cache.arrays["k"].shape[2], k.shape[1]
        if length == 1 or self.window is None or slots < self.window:  # nothing is overwritten that a new token sees
            positions = cache.slot_positions("k", lengths)
            k, v = following.read("k"), following.read("v")
        else:
            before = cache.slot_positions("k", cache.lengths)
            positions = jnp.concatenate([before, jnp.where(real, rows.positions, -1)], axis=1)
            k, v = (
                jnp.concatenate([cache.read(name), new.astype(cache.arrays[name].dtype)], axis=1)
                for name, new in (("k", k), ("v", v))
            )
        segments = (positions >= 0).astype(jnp.int32)
        return k, v, (jnp.maximum(positions, 0), segments), following
