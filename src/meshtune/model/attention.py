"""Grouped-query self-attention, for whole rows, for chunks of rows and over a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree
from meshtune.kernels.attention import AttentionRequest
from meshtune.model.attend import attend, recalled
from meshtune.model.block import Activation, Context, Cost, Divisor, Hidden, Output, RowParams, Sums
from meshtune.model.cache import SLOTS, LayerCache
from meshtune.model.compute import Compute
from meshtune.model.inputs import Rows
from meshtune.model.linear import linear, linear_params, site_key
from meshtune.model.norm import NormSpec
from meshtune.model.positions import AlibiSpec, LongQuerySpec
from meshtune.model.rope import RopeSpec, rotate
from meshtune.model.side import SHARED

ROTATED = "rotated"  # what a rematerialisation policy may keep: queries and keys, rotated
PACKED = "packed_heads"  # the logical axis of rows of queries, keys and values, head by head

Heads = Float[Array, "B T H h"]


# What a norm of queries and keys extends over: a head, all with the same weights or each with its own, or all heads.
NormOver = Literal["head", "own_head", "vector"]


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Softmax attention of H query heads over K key-value heads of h numbers each.

    Positions are rotary (`rope`), biases (`alibi`) or absent. `window` is the sliding window in tokens (None: the whole
    past), `softcap` squashes scores by tanh, `scale` multiplies them (None: h ** -0.5). `qk_norm` normalises queries
    and keys (`qk_norm_over`), before they are rotated or after (`qk_norm_after_rope`); `clip` limits the numbers of
    queries, keys and values to [-clip, clip] after that norm. `long_query` makes queries grow with their position.
    With `sinks` every head has a trained score that takes part in its softmax and has no value. With `chunk` a token
    sees only its own part of its document, of which every part is that many tokens long.
    The result is multiplied by the sigmoid of a gate, computed from the input (`gate="input"`), or beside each head's
    queries by the same projection (`gate="query"`).
    With `packed` one projection `qkv` [(H + 2 K) h, D] computes queries, keys and values: for each key-value head the
    rows of its queries, of keys and of values, so that tp, which splits the rows, gives every device whole heads.
    With `v_of_k` values are the result of the keys' projection, neither normalised nor rotated as keys are; `v_norm`
    normalises values. A layer `stores` its keys and values under a name for later layers, each of which `reads` them in
    place of computing keys and values, and has a cache of none.
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
    qk_norm_over: NormOver = "head"
    qk_norm_after_rope: bool = False
    clip: float | None = None
    long_query: LongQuerySpec | None = None
    gate: Literal["input", "query"] | None = None
    sinks: bool = False
    chunk: int | None = None
    packed: bool = False
    v_of_k: bool = False
    v_norm: NormSpec | None = None
    stores: str | None = None
    reads: str | None = None
    name: ClassVar[str] = "attn"

    def __post_init__(self):
        assert self.gate is None or not self.packed, "packed projections have no gate"
        assert not self.packed or not (self.v_of_k or self.reads or self.v_norm), "packed projections have values"
        assert self.reads is None or self.stores is None, "keys and values that are read are already stored"
        assert not self.qk_norm_after_rope or self.qk_norm_over != "vector", "heads are rotated one by one"
        assert self.heads % self.kv_heads == 0, "key-value heads must divide the heads"

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        return () if self.rope is None else (self.rope,)

    def params(self, embed: int) -> Tree:
        """q [H h, D] ([2 H h, D] with a gate beside each query), k and v [K h, D], or qkv; o [D, H h], gate [H h, D],
        and the norms of queries and keys."""
        d, H, K = (embed, "embed"), self.heads * self.head_dim, self.kv_heads * self.head_dim
        heads, kv_heads = (H, "heads"), (K, "kv_heads")
        if self.packed:
            tree = {"qkv": linear_params((H + 2 * K, PACKED), d, self.qkv_bias, self.head_dim)}
        else:
            width = 2 if self.gate == "query" else 1
            tree = {
                "q": linear_params((width * H, "heads"), d, self.qkv_bias, width * self.head_dim),
                "k": linear_params(kv_heads, d, self.qkv_bias, self.head_dim),
                "v": linear_params(kv_heads, d, self.qkv_bias),
            }
            tree = {name: params for name, params in tree.items() if name == "q" or name in self._kv_projections}
        tree["o"] = linear_params(d, heads, self.out_bias)
        if self.gate == "input":
            tree["gate"] = linear_params(heads, d, bias=False)
        if self.sinks:
            tree["sinks"] = {"weight": ArraySpec((self.heads,), "float32", ("heads",), "zeros", role="vector")}
        if self.qk_norm is not None:
            tree |= {"q_norm": self._norm_params("heads")}
            if self.reads is None:
                tree |= {"k_norm": self._norm_params("kv_heads")}
        if self.v_norm is not None and self.reads is None:
            tree["v_norm"] = self.v_norm.params(self.head_dim, "head_dim")
        return {name: node for name, node in tree.items() if node}

    @property
    def _kv_projections(self) -> tuple[str, ...]:
        return () if self.reads is not None else ("k",) if self.v_of_k else ("k", "v")

    def _norm_params(self, axis: Literal["heads", "kv_heads"]) -> Tree:
        assert self.qk_norm is not None
        count, size = (self.heads if axis == "heads" else self.kv_heads), self.head_dim
        match self.qk_norm_over:
            case "head":
                return self.qk_norm.params(size, "head_dim")
            case "own_head":
                return self.qk_norm.params_of((count, size), (axis, "head_dim"))
            case "vector":
                return self.qk_norm.params(count * size, axis)

    def apply(self, x: Hidden, node: Tree, context: Context, cache: LayerCache | None = None) -> Output:
        """Attention and its output projection."""
        rows, stored = context.rows, {}
        if context.memory is not None:
            q, (memory, memory_rows) = self._queries(x, node, context), context.memory
            k, v, past = memory["k"], memory["v"], (memory_rows.positions, memory_rows.segment_ids)
        elif self.reads is not None:
            q, memory = self._queries(x, node, context), context.side[SHARED][self.reads]
            k, v, past = memory["k"], memory["v"], memory.get("past")
        elif cache is None:
            q, k, v = self._queries_keys_values(x, node, context)
            past, stored = None, {"k": k, "v": v}
        else:
            q, k, v = self._queries_keys_values(x, node, context)
            past_kv, past, cache = recalled(cache, {"k": k, "v": v}, rows, self._reach)
            k, v = past_kv["k"], past_kv["v"]
            stored = {"k": k, "v": v, "past": past}
        mixed = attend(
            q,
            k,
            v,
            rows,
            past,
            context.compute,
            chunk=self.chunk,
            slopes=None if self.alibi is None else jnp.asarray(self.alibi.slopes, jnp.float32),
            sinks=node["sinks"]["weight"] if self.sinks else None,
            **self._scores(),
        )
        mixed = mixed.reshape(*mixed.shape[:2], -1)
        if (gate := self._gate(x, node, context.key)) is not None:
            mixed = mixed * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(mixed.dtype)
        y = linear(mixed, node["o"], site_key(context.key, "o"))
        return Output(y, cache, {}, {} if self.stores is None or not stored else {self.stores: stored})

    def memory(self, x: Hidden, node: Tree, context: Context) -> Tree:
        """Keys and values [B, T, K, h]."""
        if self.packed:
            _, k, v = self._packed(x, node, context.key)
        else:
            k, v = self._projected_kv(x, node, context.key)
        return {"k": self._rotated(k, node, "k", context.rows), "v": self._values(v, node)}

    def cache(self, batch: int, slots: int, dtype: str) -> Tree:
        """Keys and values of `slots` tokens a row, or of a window; nothing where they are another layer's."""
        if self.reads is not None:
            return {}
        slots = slots if self._reach is None else min(slots, self._reach)
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
            memory, chunk = ["qkv", "k_norm"], ["qkv", "q_norm", "sinks", "o"]
        else:
            memory, chunk = ["k", "v", "k_norm", "v_norm"], ["q", "q_norm", "gate", "sinks", "o"]
        names = frozenset(self.params(1))
        return RowParams(names.intersection(memory), names.intersection(chunk))

    def divisors(self) -> tuple[Divisor, ...]:
        replicate_axis = None if self.packed else "kv_heads"
        kv_heads = Divisor("tp", "key and value heads", self.kv_heads, replicate_axis)
        return Divisor("tp", "attention heads", self.heads), kv_heads

    def cost(self, embed: int) -> Cost:
        H, K = self.heads * self.head_dim, self.kv_heads * self.head_dim
        past = Activation("kv_heads", K, self.kv_heads, kept=True, elementwise=2, whole_rows=True)
        gate = () if self.gate is None else (Activation("heads", H, self.heads, kept=True, elementwise=1),)
        count = 0 if self.reads is not None else 2
        activations = (
            Activation("heads", H, self.heads, kept=True, elementwise=2),
            *gate,
            *(past,) * count,
            Activation("heads", H, self.heads, kept=True),
            # The log-sum-exp of every head's scores, in float32.
            Activation("heads", self.heads, self.heads, kept=True, products=0, itemsize=4),
        )
        weights = embed * ((2 + len(gate)) * H + len(self._kv_projections) * K)
        return Cost(weights, activations, pairs=4 * H, window=self._reach)

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
            packed=compute.packed or self.chunk is not None,
            alibi=self.alibi is not None,
            sinks=self.sinks,
            aligned=q_length == kv_length,
            **self._scores(),
        )

    @property
    def _reach(self) -> int | None:
        """The greatest number of tokens that one sees; None without a limit."""
        limits = [limit for limit in (self.window, self.chunk) if limit is not None]
        return min(limits) if limits else None

    def _scores(self) -> dict[str, Any]:
        """How scores are computed: the same for the kernel that runs and for the request that is asked about."""
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        return {"scale": scale, "window": self.window, "softcap": self.softcap}

    def _queries_keys_values(self, x: Hidden, node: Tree, context: Context) -> tuple[Heads, Heads, Heads]:
        rows, key = context.rows, context.key
        if self.packed:
            q, k, v = self._packed(x, node, key)
        else:
            q, (k, v) = self._heads(x, node, "q", key), self._projected_kv(x, node, key)
        return self._rotated(q, node, "q", rows), self._rotated(k, node, "k", rows), self._values(v, node)

    def _queries(self, x: Hidden, node: Tree, context: Context) -> Heads:
        q = self._packed(x, node, context.key)[0] if self.packed else self._heads(x, node, "q", context.key)
        return self._rotated(q, node, "q", context.rows)

    def _projected_kv(self, x: Hidden, node: Tree, key: Array | None) -> tuple[Heads, Heads]:
        """Keys and values as their projections give them."""
        k = self._heads(x, node, "k", key)
        return k, k if self.v_of_k else self._heads(x, node, "v", key)

    def _values(self, heads: Heads, node: Tree) -> Heads:
        if self.v_norm is not None:
            heads = self.v_norm(heads, node.get("v_norm", {}))
        return self._clipped(heads)

    def _heads(self, x: Hidden, node: Tree, name: str, key: Array | None) -> Heads:
        heads = linear(x, node[name], site_key(key, name))
        if name == "q" and self.gate == "query":
            return heads.reshape(*x.shape[:2], -1, 2 * self.head_dim)[..., : self.head_dim]
        return heads.reshape(*x.shape[:2], -1, self.head_dim)

    def _gate(self, x: Hidden, node: Tree, key: Array | None) -> Float[Array, "B T Hh"] | None:
        """What the sigmoid that multiplies the result is taken of."""
        if self.gate == "input":
            return linear(x, node["gate"], site_key(key, "gate"))
        if self.gate == "query":
            heads = linear(x, node["q"], site_key(key, "q")).reshape(*x.shape[:2], -1, 2 * self.head_dim)
            return heads[..., self.head_dim :].reshape(*x.shape[:2], -1)
        return None

    def _packed(self, x: Hidden, node: Tree, key: Array | None) -> tuple[Heads, Heads, Heads]:
        """Queries, keys and values of one projection, not rotated."""
        group = self.heads // self.kv_heads
        qkv = linear(x, node["qkv"], site_key(key, "qkv")).reshape(*x.shape[:2], -1, group + 2, self.head_dim)
        q = qkv[:, :, :, :group].reshape(*x.shape[:2], -1, self.head_dim)
        return q, qkv[:, :, :, group], qkv[:, :, :, group + 1]

    def _rotated(self, heads: Heads, node: Tree, name: Literal["q", "k"], rows: Rows) -> Heads:
        """Queries or keys, normalised where the model does that, and rotated."""
        if not self.qk_norm_after_rope:
            heads = self._normalised(heads, node, name)
        heads = self._clipped(heads)
        if self.rope is not None:
            heads = rotate(heads, *rows.angles[self.rope], interleaved=self.rope.interleaved)
        if self.qk_norm_after_rope:
            heads = self._normalised(heads, node, name)
        if name == "q" and self.long_query is not None:
            heads = self.long_query(heads, rows.positions)
        return checkpoint_name(heads, ROTATED)

    def _normalised(self, heads: Heads, node: Tree, name: Literal["q", "k"]) -> Heads:
        if self.qk_norm is None:
            return heads
        params = node.get(f"{name}_norm", {})
        if self.qk_norm_over != "vector":
            return self.qk_norm(heads, params)
        return self.qk_norm(heads.reshape(*heads.shape[:2], -1), params).reshape(heads.shape)

    def _clipped(self, heads: Heads) -> Heads:
        return heads if self.clip is None else jnp.clip(heads, -self.clip, self.clip)
