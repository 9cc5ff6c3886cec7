"""The Mamba-2 mixer (https://arxiv.org/abs/2405.21060), as Granite 4, Falcon-H1, Nemotron-H and Mamba-2 have it."""

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
from meshtune.model.linear import linear, linear_params, site_key
from meshtune.model.norm import NormSpec
from meshtune.model.row_chunks import CHUNK
from meshtune.model.short_conv import INNER, FilterSpec, not_over_cp
from meshtune.model.ssd import SsdInputs, state_space

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
