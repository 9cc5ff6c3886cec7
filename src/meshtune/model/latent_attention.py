"""Multi-head latent attention (https://arxiv.org/abs/2405.04434): keys and values of all heads are made of one narrow
latent vector of a token, which is all that a cache holds of it, beside one rotated key that all heads share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree
from meshtune.kernels.attention import AttentionRequest
from meshtune.model.attend import attend, recalled
from meshtune.model.attention import ROTATED
from meshtune.model.attention_cost import attention_activations, request
from meshtune.model.block import Activation, Context, Cost, Divisor, Hidden, Mixer, Output, RowParams
from meshtune.model.cache import SLOTS, LayerCache
from meshtune.model.compute import Compute
from meshtune.model.heads import Heads
from meshtune.model.linear import linear, linear_params, site_key
from meshtune.model.norm import NormSpec
from meshtune.model.rope import RopeSpec, rotate

LATENT = "latent"  # the logical axis of latent vectors


@dataclasses.dataclass(frozen=True)
class LatentAttentionSpec(Mixer):
    """Attention of H heads whose keys and values are made of latents of `latent` numbers.

    A head's queries and keys have `head_dim` numbers without a position and `rope.dim` rotated ones after them; the
    rotated ones of the keys are the same in all heads. Values have `value_dim` numbers. Queries are made of latents of
    `query_latent` numbers too, unless that is None. `norm` normalises latents, `scale` multiplies scores. With `bias`
    the projections into latents and the output have one.
    """

    heads: int
    head_dim: int
    value_dim: int
    latent: int
    rope: RopeSpec
    norm: NormSpec
    scale: float
    query_latent: int | None = None
    bias: bool = False
    name: ClassVar[str] = "attn"

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        return (self.rope,)

    @property
    def query_dim(self) -> int:
        """Numbers of a head's queries and keys."""
        return self.head_dim + self.rope.dim

    @property
    def kernel_dim(self) -> int:
        """Numbers of a head in the attention kernels, for which queries, keys and values are equally wide."""
        return max(self.query_dim, self.value_dim)

    def params(self, embed: int) -> Tree:
        """q [H h, D] or q_latent and q_heads, kv_latent [latent + rotated, D], kv_heads [H (h + v), latent],
        o [D, H v], and the norms of latents."""
        d, latent = (embed, "embed"), (self.latent, LATENT)
        heads = (self.heads * self.query_dim, "heads")
        if self.query_latent is None:
            tree = {"q": linear_params(heads, d, False, self.query_dim)}
        else:
            into = (self.query_latent, LATENT)
            tree = {
                "q_latent": linear_params(into, d, self.bias),
                "q_norm": self.norm.params(*into),
                "q_heads": linear_params(heads, into, False, self.query_dim),
            }
        per_head = self.head_dim + self.value_dim
        return tree | {
            "kv_latent": linear_params((self.latent + self.rope.dim, LATENT), d, self.bias),
            "kv_norm": self.norm.params(*latent),
            "kv_heads": linear_params((self.heads * per_head, "heads"), latent, False, per_head),
            "o": linear_params(d, (self.heads * self.value_dim, "heads"), self.bias),
        }

    def apply(self, x: Hidden, node: Tree, context: Context, cache: LayerCache | None = None) -> Output:
        """Attention and its output projection."""
        rows, past = context.rows, None
        q = self._queries(x, node, context)
        if context.memory is not None:
            kv, memory_rows = context.memory
            past = (memory_rows.positions, memory_rows.segment_ids)
        else:
            latents = self._latents(x, node, context)
            if cache is not None:
                latents, past, cache = recalled(cache, latents, rows, None)
                latents = {name: array.astype(x.dtype) for name, array in latents.items()}
            kv = self._expanded(latents, node, context.key)
        mixed = attend(q, kv["k"], kv["v"], rows, past, context.compute, scale=self.scale)
        mixed = mixed[..., : self.value_dim].reshape(*x.shape[:2], -1)
        return Output(linear(mixed, node["o"], site_key(context.key, "o")), cache, {})

    def memory(self, x: Hidden, node: Tree, context: Context) -> Tree:
        """Keys and values [B, T, H, h]."""
        return self._expanded(self._latents(x, node, context), node, context.key)

    def cache(self, batch: int, slots: int, dtype: str) -> Tree:
        """Latents and rotated keys of `slots` tokens a row."""
        widths = {"latent": self.latent, "rotated": self.rope.dim}
        return {
            name: ArraySpec((batch, slots, width), dtype, ("batch", SLOTS, "head_dim"), "zeros")
            for name, width in widths.items()
        }

    def row_params(self) -> RowParams:
        names = frozenset(self.params(1))
        return RowParams(
            names & {"kv_latent", "kv_norm", "kv_heads"}, names & {"q", "q_latent", "q_norm", "q_heads", "o"}
        )

    def divisors(self) -> tuple[Divisor, ...]:
        return (Divisor("tp", "attention heads", self.heads),)

    def cost(self, embed: int) -> Cost:
        H, Q = self.heads, self.heads * self.query_dim
        narrow, per_head = self.latent + self.rope.dim, self.head_dim + self.value_dim
        weights = embed * narrow + self.latent * H * per_head + H * self.value_dim * embed
        weights += embed * Q if self.query_latent is None else self.query_latent * (embed + Q)
        wide = H * self.kernel_dim
        latents = Activation("embed", narrow + (self.query_latent or 0), 1, kept=True, elementwise=1)
        queries, *others = attention_activations((wide, H), (wide, H), "heads")
        return Cost(weights, (queries, latents, *others), pairs=4 * wide)

    def attention_request(self, rows: int, q_length: int, kv_length: int, compute: Compute) -> AttentionRequest:
        return request(
            (rows, q_length, kv_length), (self.heads, self.heads, self.kernel_dim), compute, scale=self.scale
        )

    def _queries(self, x: Hidden, node: Tree, context: Context) -> Heads:
        key = context.key
        if self.query_latent is None:
            q = linear(x, node["q"], site_key(key, "q"))
        else:
            latents = self.norm(linear(x, node["q_latent"], site_key(key, "q_latent")), node["q_norm"])
            q = linear(latents, node["q_heads"], site_key(key, "q_heads"))
        q = q.reshape(*x.shape[:2], -1, self.query_dim)
        q = jnp.concatenate([q[..., : self.head_dim], self._rotated(q[..., self.head_dim :], context)], axis=-1)
        return checkpoint_name(self._padded(q), ROTATED)

    def _latents(self, x: Hidden, node: Tree, context: Context) -> dict[str, Array]:
        """The normalised latents [B, T, latent] and the rotated key [B, T, rope] of every token."""
        both = linear(x, node["kv_latent"], site_key(context.key, "kv_latent"))
        rotated = self._rotated(both[..., None, self.latent :], context)[:, :, 0]
        return {"latent": self.norm(both[..., : self.latent], node["kv_norm"]), "rotated": rotated}

    def _expanded(self, latents: Mapping[str, Array], node: Tree, key: Array | None) -> dict[str, Heads]:
        """Keys and values of all heads."""
        heads = linear(latents["latent"], node["kv_heads"], site_key(key, "kv_heads"))
        heads = heads.reshape(*heads.shape[:2], -1, self.head_dim + self.value_dim)
        shared = jnp.broadcast_to(latents["rotated"][:, :, None], (*heads.shape[:3], self.rope.dim))
        k = jnp.concatenate([heads[..., : self.head_dim], shared], axis=-1)
        return {"k": checkpoint_name(self._padded(k), ROTATED), "v": self._padded(heads[..., self.head_dim :])}

    def _rotated(self, heads: Heads, context: Context) -> Heads:
        return rotate(heads, *context.rows.angles[self.rope], interleaved=self.rope.interleaved)

    def _padded(self, heads: Heads) -> Heads:
        missing = self.kernel_dim - heads.shape[-1]
        return jnp.pad(heads, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else heads
