"""Multi-head latent attention (https://arxiv.org/abs/2405.04434): keys and values of all heads are made of one narrow
latent vector of a token, which is all that a cache holds of it, besides one rotated key that all heads share.

Keys and values of a head are linear in the latent, so there are two ways to the same result. Expanded, the heads' keys
and values are computed from every latent. Absorbed, a head's query is multiplied with its part of that matrix and
compared with the latents themselves, and the weighted sum of latents is projected to the head's value: few operations
for few queries, however many latents there are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree
from meshtune.kernels.attention import AttentionRequest
from meshtune.kernels.attention.backend import matmul_precision
from meshtune.kernels.attention.direct import DIRECT, FEW_QUERIES
from meshtune.model.attention import ROTATED, Heads, Past, attend, attention_activations, kernel_request, recall
from meshtune.model.block import Activation, Context, Cost, Divisor, Hidden, Mixer, Output, RowParams
from meshtune.model.cache import SLOTS, LayerCache
from meshtune.model.compute import Compute
from meshtune.model.inputs import SequenceInfo
from meshtune.model.linear import TiledWeight, linear, linear_params, site_key
from meshtune.model.norm import NormSpec
from meshtune.model.rope import RopeSpec, rotate
from meshtune.quantize.weight import QuantisedWeight

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
        rows, past = context.sequences, None
        q = self._queries(x, node, context)
        if context.memory is not None:
            kv, memory_rows = context.memory
            past = (memory_rows.positions, memory_rows.segment_ids)
        else:
            latents = self._latents(x, node, context)
            if cache is not None:
                latents, past, cache = recall(cache, latents, rows, None)
                latents = {name: array.astype(x.dtype) for name, array in latents.items()}
                if self.absorbs(q.shape[0], q.shape[1], latents["latent"].shape[1], node, context.compute):
                    mixed = self._attend_absorbed(q, latents, node, rows, past, context.compute)
                    return Output(linear(mixed, node["o"], site_key(context.key, "o")), cache, {})
            kv = self._expanded(latents, node, context.key)
        mixed = attend(q, kv["k"], kv["v"], rows, past, context.compute, scale=self.scale)
        mixed = mixed[..., : self.value_dim].reshape(*x.shape[:2], -1)
        return Output(linear(mixed, node["o"], site_key(context.key, "o")), cache, {})

    def absorbs(self, rows: int, queries: int, slots: int, node: Tree, compute: Compute) -> bool:
        """Whether `queries` tokens of each row attend to `slots` latents of a cache in the absorbed form.

        It does for few queries where it takes fewer operations, unless another kernel of attention than the direct one
        is forced, which may have no heads as wide as latents.
        """
        if queries > FEW_QUERIES or compute.attention not in ("auto", DIRECT.name):
            return False
        absorbed, expanded = self.operations(rows, queries, slots, adapted="adapter" in node["kv_heads"])
        return absorbed < expanded

    def operations(self, rows: int, queries: int, slots: int, *, adapted: bool = False) -> tuple[int, int]:
        """The multiplications between the queries and the heads' results, absorbed and expanded.

        `adapted` says that the matrix from latents to heads has an adapter: absorbing it takes the whole matrix.
        """
        per_head, pairs = self.latent * (self.head_dim + self.value_dim), rows * queries * slots
        absorbed = rows * queries * per_head + 2 * pairs * (self.latent + self.rope.dim)
        expanded = rows * slots * per_head + 2 * pairs * self.kernel_dim
        return self.heads * (absorbed + adapted * self.latent * per_head), self.heads * expanded

    def _attend_absorbed(
        self, q: Heads, latents: Mapping[str, Array], node: Tree, rows: SequenceInfo, past: Past, compute: Compute
    ) -> Array:
        """Attends with the heads' queries [B, T, H, kernel_dim] to the latents: [B, T, H v]."""
        weight = self._weight(node["kv_heads"], q.dtype)
        product = functools.partial(jnp.einsum, precision=matmul_precision(q.dtype), preferred_element_type=q.dtype)
        into = product("bthn,hnl->bthl", q[..., : self.head_dim], weight[:, : self.head_dim])
        into = jnp.concatenate([into, q[..., self.head_dim : self.query_dim]], axis=-1)
        # One head of keys, which are values too: the sum of their rotated part is not read.
        tokens = jnp.concatenate([latents["latent"], latents["rotated"]], axis=-1)[:, :, None]
        mixed = attend(into, tokens, tokens, rows, past, compute, scale=self.scale)[..., : self.latent]
        mixed = product("bthl,hvl->bthv", mixed, weight[:, self.head_dim :])
        return mixed.reshape(*mixed.shape[:2], -1)

    def _weight(self, node: Tree, dtype: jnp.dtype) -> Float[Array, "H n latent"]:
        """The matrix from latents to the heads' keys and values, as `linear` multiplies by it: numbers of codes,
        with the adapter, in the usual order."""
        weight = node["weight"]
        if "adapter" in node:
            weight = linear(jnp.eye(self.latent, dtype=dtype), node).T
        elif isinstance(weight, QuantisedWeight):
            weight = weight.dequantise(dtype)
        elif isinstance(weight, TiledWeight):
            weight = weight.matrix
        return weight.astype(dtype).reshape(-1, self.head_dim + self.value_dim, self.latent)

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
        queries, *remaining = attention_activations((wide, H), (wide, H), "heads")
        return Cost(weights, (queries, latents, *remaining), pairs=4 * wide)

    def attention_request(self, rows: int, q_length: int, kv_length: int, compute: Compute) -> AttentionRequest:
        return kernel_request(
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
        q = jnp.concatenate([q[..., : self.head_dim], self._rotate_heads(q[..., self.head_dim :], context)], axis=-1)
        return checkpoint_name(self._pad_heads(q), ROTATED)

    def _latents(self, x: Hidden, node: Tree, context: Context) -> dict[str, Array]:
        """The normalised latents [B, T, latent] and the rotated key [B, T, rope] of every token."""
        both = linear(x, node["kv_latent"], site_key(context.key, "kv_latent"))
        rotated = self._rotate_heads(both[..., None, self.latent :], context)[:, :, 0]
        return {"latent": self.norm(both[..., : self.latent], node["kv_norm"]), "rotated": rotated}

    def _expanded(self, latents: Mapping[str, Array], node: Tree, key: Array | None) -> dict[str, Heads]:
        """Keys and values of all heads."""
        heads = linear(latents["latent"], node["kv_heads"], site_key(key, "kv_heads"))
        heads = heads.reshape(*heads.shape[:2], -1, self.head_dim + self.value_dim)
        shared = jnp.broadcast_to(latents["rotated"][:, :, None], (*heads.shape[:3], self.rope.dim))
        k = jnp.concatenate([heads[..., : self.head_dim], shared], axis=-1)
        return {"k": checkpoint_name(self._pad_heads(k), ROTATED), "v": self._pad_heads(heads[..., self.head_dim :])}

    def _rotate_heads(self, heads: Heads, context: Context) -> Heads:
        return rotate(heads, *context.sequences.angles[self.rope], interleaved=self.rope.interleaved)

    def _pad_heads(self, heads: Heads) -> Heads:
        missing = self.kernel_dim - heads.shape[-1]
        return jnp.pad(heads, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else heads
