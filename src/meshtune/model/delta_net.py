"""The gated delta net of Qwen3-Next and Qwen3.5 (https://arxiv.org/abs/2412.06464): linear attention with a state that
is corrected by the delta rule and decays."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree
from meshtune.model.block import Activation, Carried, Context, Cost, Divisor, Hidden, Mixer, Output
from meshtune.model.cache import LayerCache, MixerState, RowState
from meshtune.model.delta_rule import CHUNK, DeltaInputs, gated_delta_rule
from meshtune.model.linear import linear, linear_params, site_key
from meshtune.model.norm import NormSpec
from meshtune.model.short_conv import INNER, FilterSpec, not_over_cp

STATE = "state"


@dataclasses.dataclass(frozen=True)
class DeltaNetSpec(Mixer):
    """A gated delta net of `key_heads` heads of queries and keys and a multiple of them of values.

    Projections of the input: queries, keys and values, which a filter of `taps` taps and SiLU follow; z, which gates
    the normalised result; b, whose sigmoid is the strength of each update, and a, for the decay
    exp(-exp(A_log) softplus(a + dt_bias)). They are `qkv`, `z`, `b` and `a`, or fused (`qkvz` and `ba`). The
    rows of qkv, qkvz, ba and of the filter go key head by key head: its queries, its keys, its values (and their z),
    so that tp gives every device whole heads.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    norm: NormSpec
    fused: bool = False
    name: ClassVar[str] = "delta"

    def __post_init__(self):
        assert self.value_heads % self.key_heads == 0, "key heads must divide the value heads"

    @property
    def values(self) -> int:
        """Numbers of all heads of values."""
        return self.value_heads * self.value_dim

    @property
    def filter(self) -> FilterSpec:
        channels = 2 * self.key_heads * self.key_dim + self.values
        return FilterSpec(channels, self.taps, activation="silu")

    @property
    def into(self) -> dict[str, int]:
        """The rows of each projection of the input."""
        wide, heads = self.filter.channels, self.value_heads
        if self.fused:
            return {"qkvz": wide + self.values, "ba": 2 * heads}
        return {"qkv": wide, "z": self.values, "b": heads, "a": heads}

    def params(self, embed: int) -> Tree:
        """The projections of the input, filter [channels, taps], A_log and dt_bias [H], norm [dv], out [D, H dv]."""
        narrow, heads = (embed, "embed"), (self.value_heads,)
        tree = {name: linear_params((rows, INNER), narrow, bias=False) for name, rows in self.into.items()}
        return tree | {
            "filter": self.filter.params(),
            "A_log": ArraySpec(heads, "float32", (INNER,), "zeros", role="vector"),
            "dt_bias": ArraySpec(heads, "float32", (INNER,), "ones", role="vector"),
            "norm": self.norm.params(self.value_dim, "head_dim"),
            "out": linear_params(narrow, (self.values, INNER), bias=False),
        }

    def apply(self, x: Hidden, node: Tree, context: Context, cache: MixerState) -> Output:
        """The mixer's result. The decay and all that has to do with the state are in float32."""
        rows, (B, T) = context.sequences, x.shape[:2]
        qkv, z, b, a = self._project(x, node, context.key)
        qkv, cache = self.filter.apply(qkv, node["filter"], rows, cache)
        by_head = qkv.reshape(B, T, self.key_heads, -1)
        q, k, v = jnp.split(by_head, [self.key_dim, 2 * self.key_dim], axis=-1)
        v = v.reshape(B, T, self.value_heads, self.value_dim)
        g = -jnp.exp(node["A_log"].astype(jnp.float32)) * jax.nn.softplus(a + node["dt_bias"].astype(jnp.float32))
        beta, segment_ids = jax.nn.sigmoid(b), rows.segment_ids
        if isinstance(cache, LayerCache):  # a cached row is one segment, whose state padding leaves as it is
            real = (segment_ids > 0)[..., None]
            g, beta, segment_ids = jnp.where(real, g, 0), jnp.where(real, beta, 0), jnp.ones_like(segment_ids)
        state = None if cache is None else cache.read(STATE)
        state_segment = cache.segments[:, -1] if isinstance(cache, RowState) else None
        o, state = gated_delta_rule(DeltaInputs(q, k, v, g, beta, segment_ids), state, state_segment)
        if cache is not None:
            cache = cache.replace(STATE, state)
        o = self.norm(o, node["norm"]) * jax.nn.silu(z.reshape(o.shape).astype(jnp.float32))
        y = linear(o.reshape(B, T, -1).astype(x.dtype), node["out"], site_key(context.key, "out"))
        return Output(y, cache, {})

    def _project(self, x: Hidden, node: Tree, key: Array | None) -> tuple[Float[Array, "B T C"], Array, Array, Array]:
        """qkv, z and, in float32, b and a."""
        products = {name: linear(x, node[name], site_key(key, name)) for name in self.into}
        if not self.fused:
            qkv, z, b, a = products.values()
        else:
            qkvz, ba = (part.reshape(*x.shape[:2], self.key_heads, -1) for part in products.values())
            width = self.filter.channels // self.key_heads
            flat = (*x.shape[:2], -1)
            qkv, z = qkvz[..., :width].reshape(flat), qkvz[..., width:].reshape(flat)
            b, a = (part.reshape(flat) for part in jnp.split(ba, 2, axis=-1))
        return qkv, z, b.astype(jnp.float32), a.astype(jnp.float32)

    def cache(self, batch: int, slots: int, dtype: str) -> Tree:
        """The state, in float32, and the last inputs of the filter, however long the rows."""
        shape = (batch, self.value_heads, self.key_dim, self.value_dim)
        state = ArraySpec(shape, "float32", ("batch", INNER, "head_dim", "head_dim"), "zeros")
        return {STATE: state} | self.filter.cache(batch, dtype)

    def carried(self, batch: int, dtype: str) -> Carried:
        """Carries what it caches: its state and the last inputs of the filter."""
        return Carried(self.cache(batch, 0, dtype), max(1, self.taps - 1))

    def divisors(self) -> tuple[Divisor, ...]:
        return (Divisor("tp", "key heads of delta nets", self.key_heads, INNER), not_over_cp("delta nets"))

    def cost(self, embed: int) -> Cost:
        """The products with the state and within a chunk count as pairs of tokens of a window."""
        heads, qkv = self.value_heads, self.filter.channels
        width, units = sum(self.into.values()), self.key_heads
        state = Activation(INNER, heads * self.key_dim * self.value_dim // CHUNK, units, kept=False, itemsize=4)
        products = Activation(INNER, width, units, kept=True, products=1, elementwise=1)
        mixed = Activation(INNER, qkv, units, kept=False, products=2, elementwise=2)
        out = Activation(INNER, self.values, units, kept=False, products=1, elementwise=2, itemsize=4)
        within = 2 * heads * (2 * self.key_dim + 2 * self.value_dim + CHUNK)
        pairs = within + 6 * heads * self.key_dim * self.value_dim // CHUNK
        return Cost(embed * (width + self.values), (products, mixed, state, out), pairs=pairs, window=CHUNK)
