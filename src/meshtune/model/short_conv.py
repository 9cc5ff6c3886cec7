"""Short depthwise causal convolutions: the filter that recurrent mixers share, and the gated short convolution of LFM2.

A tap sees tokens of its own segment only. Over a cache, a filter of K taps keeps the K - 1 last inputs of each row.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree
from meshtune.model.block import Activation, Carried, Context, Cost, Divisor, Hidden, Mixer, Output
from meshtune.model.cache import MixerState, RowState
from meshtune.model.inputs import SequenceInfo
from meshtune.model.linear import linear, linear_params, site_key

INNER = "inner"  # the logical axis of the channels and heads of mixers that carry a state from token to token
CONV_CACHE = "conv_inputs"

Channels = Float[Array, "B T C"]


def not_over_cp(name: str) -> Divisor:
    """Refuses cp for a mixer that passes a state from token to token."""
    return Divisor("cp", name, 1, reason="each token needs the state after the token before it, in the order of a row")


@dataclasses.dataclass(frozen=True)
class FilterSpec:
    """A depthwise causal convolution of `taps` taps over C channels: y[t] = sum_j weight[:, taps - 1 - j] x[t - j]."""

    channels: int
    taps: int
    bias: bool = False
    activation: Literal["silu"] | None = None

    def params(self) -> Tree:
        """weight [C, taps] and perhaps bias [C]."""
        weight = ArraySpec((self.channels, self.taps), "float32", (INNER, "whole"), role="conv")
        bias = ArraySpec((self.channels,), "float32", (INNER,), "zeros", role="vector")
        return {"weight": weight} | ({"bias": bias} if self.bias else {})

    def cache(self, batch: int, dtype: str) -> Tree:
        """The last inputs of each row, [B, taps - 1, C], oldest first; zeros before the first token."""
        return {CONV_CACHE: ArraySpec((batch, self.taps - 1, self.channels), dtype, ("batch", "whole", INNER), "zeros")}

    def carried(self, batch: int, dtype: str) -> Carried:
        """Its last inputs, in training by chunks of rows."""
        return Carried(self.cache(batch, dtype), self.taps - 1)

    def apply(self, x: Channels, node: Tree, rows: SequenceInfo, cache: MixerState) -> tuple[Channels, MixerState]:
        """(the filtered channels in x's dtype, accumulated in float32; the next cache)."""
        past, length = self.taps - 1, x.shape[1]
        if cache is None:
            x_and_past = jnp.pad(x, ((0, 0), (past, 0), (0, 0)))
            segments = jnp.pad(rows.segment_ids, ((0, 0), (past, 0)), constant_values=-1)
        elif isinstance(cache, RowState):
            x_and_past = jnp.concatenate([cache.read(CONV_CACHE).astype(x.dtype), x], axis=1)
            segments = jnp.concatenate([cache.segments[:, -past:], rows.segment_ids], axis=1)
            cache = cache.replace(CONV_CACHE, x_and_past[:, -past:])
        else:
            real = rows.segment_ids > 0
            x_and_past = jnp.concatenate([cache.read(CONV_CACHE).astype(x.dtype), jnp.where(real[..., None], x, 0)], 1)
            last = jnp.sum(real, axis=1)[:, None] + jnp.arange(past)
            cache = cache.replace(CONV_CACHE, jnp.take_along_axis(x_and_past, last[..., None], axis=1))
            segments = None  # a cached row is one segment
        weight, total = node["weight"].astype(jnp.float32), jnp.zeros(x.shape, jnp.float32)
        for tap in range(self.taps):
            part = x_and_past[:, tap : tap + length].astype(jnp.float32) * weight[:, tap]
            if segments is not None and tap < past:
                part = jnp.where((segments[:, tap : tap + length] == rows.segment_ids)[..., None], part, 0)
            total = total + part
        if "bias" in node:
            total = total + node["bias"].astype(jnp.float32)
        if self.activation == "silu":
            total = jax.nn.silu(total)
        return total.astype(x.dtype), cache


@dataclasses.dataclass(frozen=True)
class ShortConvSpec(Mixer):
    """The gated short convolution of LFM2: out(c * filter(b * x)), where b, c and x are projections of the input.

    One projection `in` [3 D, D] computes all three: a row of b, of c and of x in turn, so that tp, which splits the
    rows, gives every device all three of a channel.
    """

    taps: int
    channels: int
    bias: bool = False
    name: ClassVar[str] = "conv"

    @property
    def filter(self) -> FilterSpec:
        return FilterSpec(self.channels, self.taps, self.bias)

    def params(self, embed: int) -> Tree:
        """in [3 C, D], filter [C, taps] and out [D, C]."""
        narrow = (embed, "embed")
        return {
            "in": linear_params((3 * self.channels, INNER), narrow, self.bias),
            "filter": self.filter.params(),
            "out": linear_params(narrow, (self.channels, INNER), self.bias),
        }

    def apply(self, x: Hidden, node: Tree, context: Context, cache: MixerState) -> Output:
        """The mixer's result."""
        gates = linear(x, node["in"], site_key(context.key, "in")).reshape(*x.shape[:2], self.channels, 3)
        y, cache = self.filter.apply(gates[..., 0] * gates[..., 2], node["filter"], context.sequences, cache)
        return Output(linear(gates[..., 1] * y, node["out"], site_key(context.key, "out")), cache, {})

    def cache(self, batch: int, slots: int, dtype: str) -> Tree:
        """The last inputs of the filter, however long the rows."""
        return self.filter.cache(batch, dtype)

    def carried(self, batch: int, dtype: str) -> Carried:
        return self.filter.carried(batch, dtype)

    def divisors(self) -> tuple[Divisor, ...]:
        return (
            Divisor("tp", "channels of short convolutions", self.channels, INNER),
            not_over_cp("short convolutions"),
        )

    def cost(self, embed: int) -> Cost:
        wide = Activation(INNER, 3 * self.channels, self.channels, kept=True, products=1, elementwise=1)
        mixed = Activation(INNER, self.channels, self.channels, kept=False, products=1, elementwise=2)
        return Cost(4 * embed * self.channels, (wide, mixed, mixed))
