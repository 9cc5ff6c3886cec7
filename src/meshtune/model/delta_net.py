"""The gated delta rule: a mixer with a matrix of memory for each head (https://arxiv.org/abs/2412.06464).

For each head, with a state S [dk, dv] in float32 that is zero before each segment:

    S <- exp(g_t) S;    S <- S + k_t (beta_t (v_t - S^T k_t))^T;    o_t = S^T q_t

Within a chunk of C tokens the rank-one updates are combined by the inverse of a triangular matrix, so that all work is
matrix products; between chunks the state is carried. The backward pass keeps the state before each chunk and computes
the rest of a chunk again.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree
from meshtune.model.block import Activation, Carried, Context, Cost, Divisor, Hidden, Mixer, Output
from meshtune.model.cache import LayerCache, MixerState, RowState
from meshtune.model.linear import linear, linear_params, site_key
from meshtune.model.norm import NormSpec
from meshtune.model.row_chunks import CHUNK, chunk_size, in_chunks, in_rows, pair_decays, product
from meshtune.model.short_conv import INNER, FilterSpec, not_over_cp

NORM_EPS = 1e-6  # under the root of the sum of squares by which queries and keys are divided

States = Float[Array, "B H k v"]
Squares = Float[Array, "*B C C"]


class DeltaInputs(NamedTuple):
    """Inputs of the rule for each token: q and k of Hk heads, each for H / Hk neighbouring heads of v; float32 log
    decays g <= 0 and strengths beta in [0, 1] for each head of v. A token with g = beta = 0 leaves the state unchanged.
    """

    q: Float[Array, "B T Hk k"]
    k: Float[Array, "B T Hk k"]
    v: Float[Array, "B T H v"]
    g: Float[Array, "B T H"]
    beta: Float[Array, "B T H"]
    segment_ids: Int[Array, "B T"]


def gated_delta_rule(
    inputs: DeltaInputs,
    state: States | None = None,
    state_segment: Int[Array, "B"] | None = None,
    *,
    chunk: int = CHUNK,
) -> tuple[Float[Array, "B T H v"], States]:
    """(o in float32, the state after the last token). Queries and keys are divided by their length, queries by
    sqrt(dk) as well.

    `state` is the one before the rows, None: zero; `state_segment` its segment, None: that of each row's first token.
    """
    (B, T, H, dv), size_k = inputs.v.shape, inputs.k.shape[-1]
    size = chunk_size(T, chunk)
    chunks = jax.tree.map(lambda x: in_chunks(x, size), inputs)
    if state is None:
        state = jnp.zeros((B, H, size_k, dv), jnp.float32)
    if state_segment is None:
        state_segment = inputs.segment_ids[:, 0]
    (state, _), o = lax.scan(jax.checkpoint(_chunk), (state, state_segment), chunks)
    return in_rows(o.transpose(0, 1, 3, 2, 4), T), state


def _chunk(carry: tuple[States, Array], chunk: DeltaInputs) -> tuple[tuple[States, Array], Float[Array, "B H C v"]]:
    state, state_segment = carry
    repeats = chunk.v.shape[2] // chunk.k.shape[2]
    q, k = (jnp.repeat(_unit(x), repeats, axis=2).transpose(0, 2, 1, 3) for x in (chunk.q, chunk.k))
    q = q * q.shape[-1] ** -0.5
    v = chunk.v.astype(jnp.float32).transpose(0, 2, 1, 3)
    beta = chunk.beta.transpose(0, 2, 1)[..., None]
    between, from_state, to_end = pair_decays(chunk.g.transpose(0, 2, 1), chunk.segment_ids, state_segment)

    strengths = jnp.tril(product("bhik,bhjk->bhij", k * beta, k) * between, -1)
    errors = beta * (v - product("bhik,bhkv->bhiv", k * from_state[..., None], state))
    writes = product("bhij,bhjv->bhiv", unit_lower_inverse(strengths), errors)
    o = product("bhik,bhkv->bhiv", q * from_state[..., None], state)
    o = o + product("bhij,bhjv->bhiv", product("bhik,bhjk->bhij", q, k) * between, writes)
    state = state * from_state[..., -1, None, None]
    state = state + product("bhik,bhiv->bhkv", k * to_end[..., None], writes)
    return (state, chunk.segment_ids[:, -1]), o


def _unit(x: Array) -> Array:
    wide = x.astype(jnp.float32)
    return wide * lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + NORM_EPS)


@jax.custom_vjp
def unit_lower_inverse(lower: Squares) -> Squares:
    """The inverse of I + lower, which is strictly lower triangular; its size is a power of two.

    By doubling: the inverse of [[A, 0], [L, B]] is [[A', 0], [-B' L A', B']]. As stable as substitution, in products.
    """
    size = lower.shape[-1]
    inverses = jnp.ones((*lower.shape[:-2], size, 1, 1), lower.dtype)  # of the blocks on the diagonal
    width = 1
    while width < size:
        count = size // (2 * width)
        blocks = lower.reshape(*lower.shape[:-2], count, 2, width, count, 2, width)
        below = jnp.stack([blocks[..., n, 1, :, n, 0, :] for n in range(count)], axis=-3)
        first, second = inverses[..., 0::2, :, :], inverses[..., 1::2, :, :]
        corner = -product("...ij,...jk,...kl->...il", second, below, first)
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverses = jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        width *= 2
    return inverses[..., 0, :, :]


def _inverse_forward(lower: Squares) -> tuple[Squares, Squares]:
    inverse = unit_lower_inverse(lower)
    return inverse, inverse


def _inverse_backward(inverse: Squares, cotangent: Any) -> tuple[Squares]:
    gradient = -product("...ji,...jk,...lk->...il", inverse, cotangent, inverse)
    return (jnp.tril(gradient, -1),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)


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
