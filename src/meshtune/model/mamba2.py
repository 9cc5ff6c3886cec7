"""Mamba 2: a state-space mixer and its computation by chunks (https://arxiv.org/abs/2405.21060).

For each head, with a state S [P, N] in float32 that is zero before each segment:

    S <- exp(g_t) S + u_t B_t^T;    y_t = S C_t

Within a chunk of tokens it is attention with decays for weights; between chunks the state is carried. The backward pass
keeps the state before each chunk and computes the rest of a chunk again.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

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

States = Float[Array, "B G r P N"]


class SsdInputs(NamedTuple):
    """Inputs of the recurrence for each token: u of r heads in each of G groups, B and C of each group, and float32 log
    decays g <= 0 of each head. A token with g = 0 and u = 0 leaves the state unchanged."""

    u: Float[Array, "B T G r P"]
    B: Float[Array, "B T G N"]
    C: Float[Array, "B T G N"]
    g: Float[Array, "B T G r"]
    segment_ids: Int[Array, "B T"]


def state_space(
    inputs: SsdInputs, state: States | None = None, state_segment: Int[Array, "B"] | None = None, *, chunk: int = CHUNK
) -> tuple[Float[Array, "B T G r P"], States]:
    """(y in float32, the state after the last token).

    `state` is the one before the rows, None: zero; `state_segment` its segment, None: that of each row's first token.
    """
    rows, length, *heads = inputs.u.shape
    size = chunk_size(length, chunk)
    chunks = jax.tree.map(lambda x: in_chunks(x, size), inputs)
    if state is None:
        state = jnp.zeros((rows, *heads, inputs.B.shape[-1]), jnp.float32)
    if state_segment is None:
        state_segment = inputs.segment_ids[:, 0]
    (state, _), y = lax.scan(jax.checkpoint(_chunk), (state, state_segment), chunks)
    return in_rows(y, length), state


def _chunk(carry: tuple[States, Array], chunk: SsdInputs) -> tuple[tuple[States, Array], Float[Array, "B C G r P"]]:
    state, state_segment = carry
    u, B, C = (x.astype(jnp.float32) for x in (chunk.u, chunk.B, chunk.C))
    rows, size, groups, heads = chunk.g.shape
    g = chunk.g.reshape(rows, size, -1).transpose(0, 2, 1)
    decays = pair_decays(g, chunk.segment_ids, state_segment)
    between, from_state, to_end = (x.reshape(rows, groups, heads, *x.shape[2:]) for x in decays)
    weights = product("bign,bjgn->bgij", C, B)[:, :, None] * between
    y = product("bgrij,bjgrp->bigrp", weights, u)
    y = y + product("bign,bgrpn->bigrp", C, state) * from_state.transpose(0, 3, 1, 2)[..., None]
    decayed = u * to_end.transpose(0, 3, 1, 2)[..., None]
    state = state * from_state[..., -1, None, None] + product("bjgrp,bjgn->bgrpn", decayed, B)
    return (state, chunk.segment_ids[:, -1]), y


STATE = "state"


@dataclasses.dataclass(frozen=True)
class Mamba2Spec(Mixer):
    """A state-space mixer of H heads of P numbers in G groups, with a state [P, N] for each head.

    The projection `in` computes a gate z [H P], what goes into the state, x [H P], with B and C [G N], and dt [H]; each
    of these five parts is multiplied by its number of `scales`. A filter of `taps` taps and SiLU follow on x, B and C.
    dt is softplus(dt + dt_bias), limited to `dt_limit`; the log decay is -exp(A_log) dt, and D x is added to the
    result. That is multiplied by silu(z), and normalised group by group after it (`gate_first`) or before it; without a
    norm it is only gated. Rows of `in` and of the filter go group by group, so that tp gives every device whole
    groups.
    """

    heads: int
    head_dim: int
    state: int
    groups: int
    taps: int
    norm: NormSpec | None
    gate_first: bool = True
    filter_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    scales: tuple[float, float, float, float, float] | None = None
    name: ClassVar[str] = "mamba"

    def __post_init__(self):
        assert self.heads % self.groups == 0, "groups must divide the heads"

    @property
    def inner(self) -> int:
        """Numbers of all heads."""
        return self.heads * self.head_dim

    @property
    def filter(self) -> FilterSpec:
        return FilterSpec(self.inner + 2 * self.groups * self.state, self.taps, self.filter_bias, "silu")

    @property
    def sections(self) -> tuple[int, int, int, int, int]:
        """The rows of z, x, B, C and dt."""
        return self.inner, self.inner, self.groups * self.state, self.groups * self.state, self.heads

    def params(self, embed: int) -> Tree:
        """in [2 H P + 2 G N + H, D], filter, A_log, dt_bias and D [H], norm [H P], out [D, H P]."""
        narrow, heads = (embed, "embed"), (self.heads,)
        tree = {
            "in": linear_params((sum(self.sections), INNER), narrow, self.in_bias),
            "filter": self.filter.params(),
            "A_log": ArraySpec(heads, "float32", (INNER,), "zeros", role="vector"),
            "dt_bias": ArraySpec(heads, "float32", (INNER,), "zeros", role="vector"),
            "D": ArraySpec(heads, "float32", (INNER,), "ones", role="vector"),
            "out": linear_params(narrow, (self.inner, INNER), self.out_bias),
        }
        return tree if self.norm is None else tree | {"norm": self.norm.params(self.inner, INNER)}

    def apply(self, x: Hidden, node: Tree, context: Context, cache: MixerState) -> Output:
        """The mixer's result. Time steps, decays and all that has to do with the state are in float32."""
        rows, (batch, length) = context.sequences, x.shape[:2]
        by_group = (batch, length, self.groups)
        projected = linear(x, node["in"], site_key(context.key, "in")).reshape(*by_group, -1)
        z, u, B, C, dt = self._parts(projected)
        into_state, cache = self.filter.apply(
            jnp.concatenate([u, B, C], axis=-1).reshape(batch, length, -1), node["filter"], rows, cache
        )
        into_state = into_state.reshape(*by_group, -1)
        u, B, C = jnp.split(into_state, [u.shape[-1], u.shape[-1] + self.state], axis=-1)
        u = u.reshape(*by_group, -1, self.head_dim).astype(jnp.float32)
        bias, A_log, D = (node[name].astype(jnp.float32).reshape(self.groups, -1) for name in ("dt_bias", "A_log", "D"))
        dt = jnp.clip(jax.nn.softplus(dt.astype(jnp.float32) + bias), *self.dt_limit)
        segment_ids = rows.segment_ids
        if isinstance(cache, LayerCache):  # a cached row is one segment, whose state padding leaves as it is
            dt = jnp.where((segment_ids > 0)[:, :, None, None], dt, 0)
            segment_ids = jnp.ones_like(segment_ids)
        state = None if cache is None else cache.read(STATE)
        state_segment = cache.segments[:, -1] if isinstance(cache, RowState) else None
        inputs = SsdInputs(u * dt[..., None], B, C, -jnp.exp(A_log) * dt, segment_ids)
        y, state = state_space(inputs, state, state_segment)
        if cache is not None:
            cache = cache.replace(STATE, state)
        y = self._gate_result((y + D[..., None] * u).reshape(*by_group, -1), z, node)
        return Output(linear(y.astype(x.dtype), node["out"], site_key(context.key, "out")), cache, {})

    def _parts(self, projected: Float[Array, "B T G n"]) -> list[Array]:
        """z, x, B, C and dt of each group."""
        ends = [sum(self.sections[: n + 1]) // self.groups for n in range(4)]
        parts = jnp.split(projected, ends, axis=-1)
        return parts if self.scales is None else [part * s for part, s in zip(parts, self.scales, strict=True)]

    def _gate_result(self, y: Float[Array, "B T G n"], z: Float[Array, "B T G n"], node: Tree) -> Float[Array, "B T I"]:
        """The result gated by z and normalised, in float32."""
        flat, gate = (*y.shape[:2], -1), jax.nn.silu(z.astype(jnp.float32))
        if self.norm is None:
            return (y * gate).reshape(flat)
        normalise = NormSpec(self.norm.eps, "rms_plain")
        weight = node["norm"]["weight"].astype(jnp.float32)
        if self.gate_first:
            return normalise(y * gate, {}).reshape(flat) * weight
        return normalise(y, {}).reshape(flat) * weight * gate.reshape(flat)

    def cache(self, batch: int, slots: int, dtype: str) -> Tree:
        """The state, in float32, and the last inputs of the filter, however long the rows."""
        shape = (batch, self.groups, self.heads // self.groups, self.head_dim, self.state)
        axes = ("batch", INNER, "whole", "head_dim", "whole")
        return {STATE: ArraySpec(shape, "float32", axes, "zeros")} | self.filter.cache(batch, dtype)

    def carried(self, batch: int, dtype: str) -> Carried:
        """Carries what it caches: its state and the last inputs of the filter."""
        return Carried(self.cache(batch, 0, dtype), max(1, self.taps - 1))

    def divisors(self) -> tuple[Divisor, ...]:
        return (Divisor("tp", "groups of Mamba-2 heads", self.groups, INNER), not_over_cp("Mamba-2 layers"))

    def cost(self, embed: int) -> Cost:
        """The products with the state and within a chunk count as pairs of tokens of a window."""
        width, units = sum(self.sections), self.groups
        products = Activation(INNER, width, units, kept=True, products=1, elementwise=1)
        mixed = Activation(INNER, self.filter.channels, units, kept=False, products=2, elementwise=2)
        state = Activation(INNER, self.inner * self.state // CHUNK, units, kept=False, itemsize=4)
        out = Activation(INNER, self.inner, units, kept=False, products=1, elementwise=3, itemsize=4)
        pairs = 2 * (self.inner + self.groups * self.state) + 4 * self.inner * self.state // CHUNK
        return Cost(embed * (width + self.inner), (products, mixed, state, out), pairs=pairs, window=CHUNK)
