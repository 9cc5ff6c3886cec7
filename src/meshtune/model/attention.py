"""Grouped-query self-attention, for whole rows, for chunks of rows and over a cache."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree
from meshtune.kernels.attention import AttentionRequest
from meshtune.model.attend import attend, recalled
from meshtune.model.attention_cost import attention_activations, request
from meshtune.model.block import Context, Cost, Divisor, Hidden, Mixer, Output, RowParams
from meshtune.model.cache import LayerCache
from meshtune.model.coded_cache import BY_HEAD
from meshtune.model.compute import Compute
from meshtune.model.heads import PACKED, Heads, NormOver, clipped, head_norm_params, normalised, projected, unpacked
from meshtune.model.inputs import Rows
from meshtune.model.linear import linear, linear_params, site_key
from meshtune.model.norm import NormSpec
from meshtune.model.positions import AlibiSpec, LongQuerySpec
from meshtune.model.rope import RopeSpec, rotate
from meshtune.model.side import SHARED

ROTATED = "rotated"  # what a rematerialisation policy may keep: queries and keys, rotated


@dataclasses.dataclass(frozen=True)
class AttentionSpec(Mixer):
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
        if self.packed:
            tree = {"qkv": linear_params((H + 2 * K, PACKED), d, self.qkv_bias, self.head_dim)}
        else:
            width = 2 if self.gate == "query" else 1
            tree = {
                "q": linear_params((width * H, "heads"), d, self.qkv_bias, width * self.head_dim),
                "k": linear_params((K, "kv_heads"), d, self.qkv_bias, self.head_dim),
                "v": linear_params((K, "kv_heads"), d, self.qkv_bias),
            }
            tree = {name: params for name, params in tree.items() if name == "q" or name in self._kv_projections}
        tree["o"] = linear_params(d, (H, "heads"), self.out_bias)
        if self.gate == "input":
            tree["gate"] = linear_params((H, "heads"), d, bias=False)
        if self.sinks:
            tree["sinks"] = {"weight": ArraySpec((self.heads,), "float32", ("heads",), "zeros", role="vector")}
        tree["q_norm"] = head_norm_params(self.qk_norm, self.qk_norm_over, (self.heads, "heads"), self.head_dim)
        if self.reads is None:
            kv_heads = (self.kv_heads, "kv_heads")
            tree["k_norm"] = head_norm_params(self.qk_norm, self.qk_norm_over, kv_heads, self.head_dim)
            tree["v_norm"] = head_norm_params(self.v_norm, "head", kv_heads, self.head_dim)
        return {name: node for name, node in tree.items() if node}

    @property
    def _kv_projections(self) -> tuple[str, ...]:
        return () if self.reads is not None else ("k",) if self.v_of_k else ("k", "v")

    def apply(self, x: Hidden, node: Tree, context: Context, cache: LayerCache | None = None) -> Output:
        """Attention and its output projection."""
        rows, past, stored = context.rows, None, {}
        if context.memory is not None:
            memory, memory_rows = context.memory
            heads = self._heads(x, node, context, "q") | memory
            past = memory_rows.positions, memory_rows.segment_ids
        elif self.reads is not None:
            memory = context.side[SHARED][self.reads]
            heads, past = self._heads(x, node, context, "q") | memory, memory.get("past")
        else:
            heads = self._heads(x, node, context, "qkv")
            if cache is not None:
                past_kv, past, cache = recalled(cache, {name: heads[name] for name in "kv"}, rows, self._reach)
                heads |= past_kv
            if self.stores is not None:
                memory = {"k": heads["k"], "v": heads["v"]}
                stored = {self.stores: memory if past is None else memory | {"past": past}}
        mixed = attend(
            heads["q"],
            heads["k"],
            heads["v"],
            rows,
            past,
            context.compute,
            chunk=self.chunk,
            slopes=None if self.alibi is None else jnp.asarray(self.alibi.slopes, jnp.float32),
            sinks=node["sinks"]["weight"] if self.sinks else None,
            **self._scores(),
        )
        if self.gate is not None:
            mixed = mixed * jax.nn.sigmoid(heads["gate"].astype(jnp.float32)).astype(mixed.dtype)
        mixed = mixed.reshape(*mixed.shape[:2], -1)
        return Output(linear(mixed, node["o"], site_key(context.key, "o")), cache, {}, stored)

    def memory(self, x: Hidden, node: Tree, context: Context) -> Tree:
        """Keys and values [B, T, K, h]."""
        return self._heads(x, node, context, "kv")

    def cache(self, batch: int, slots: int, dtype: str) -> Tree:
        """Keys and values of `slots` tokens a row, or of a window; nothing where they are another layer's."""
        if self.reads is not None:
            return {}
        slots = slots if self._reach is None else min(slots, self._reach)
        shape = (batch, self.kv_heads, slots, self.head_dim)
        array = ArraySpec(shape, dtype, ("batch", *BY_HEAD), "zeros")
        return {"k": array, "v": array}

    def row_params(self) -> RowParams:
        names = frozenset(self.params(1))
        memory = names & {"qkv", "k", "v", "k_norm", "v_norm"}
        return RowParams(memory, names - memory | names & {"qkv"})  # each pass reads its share of a packed projection

    def divisors(self) -> tuple[Divisor, ...]:
        replicate_axis = None if self.packed else "kv_heads"
        kv_heads = Divisor("tp", "key and value heads", self.kv_heads, replicate_axis)
        return Divisor("tp", "attention heads", self.heads), kv_heads

    def cost(self, embed: int) -> Cost:
        queries, keys = (self.heads * self.head_dim, self.heads), (self.kv_heads * self.head_dim, self.kv_heads)
        gates = 0 if self.gate is None else 1
        weights = embed * ((2 + gates) * queries[0] + len(self._kv_projections) * keys[0])
        activations = attention_activations(queries, None if self.reads else keys, "kv_heads", gates)
        return Cost(weights, activations, pairs=4 * queries[0], window=self._reach)

    def attention_request(self, rows: int, q_length: int, kv_length: int, compute: Compute) -> AttentionRequest:
        return request(
            (rows, q_length, kv_length),
            (self.heads, self.kv_heads, self.head_dim),
            compute,
            chunk=self.chunk,
            alibi=self.alibi is not None,
            sinks=self.sinks,
            **self._scores(),
        )

    @property
    def _reach(self) -> int | None:
        """The greatest number of tokens that one sees; None without a limit."""
        return min((limit for limit in (self.window, self.chunk) if limit is not None), default=None)

    def _scores(self) -> dict[str, Any]:
        """How scores are computed: the same for the kernel that runs and for the request that is asked about."""
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        return {"scale": scale, "window": self.window, "softcap": self.softcap}

    def _heads(self, x: Hidden, node: Tree, context: Context, names: Literal["q", "kv", "qkv"]) -> dict[str, Heads]:
        """Queries [B, T, H, h], keys and values [B, T, K, h], ready for the kernels; beside queries their gate."""
        if self.packed:
            qkv = linear(x, node["qkv"], site_key(context.key, "qkv"))
            heads = unpacked(qkv, self.heads // self.kv_heads, self.head_dim, names)
        else:
            heads = projected(x, node, context.key, names, self.head_dim, v_of_k=self.v_of_k, gate=self.gate)
        if "q" in heads:
            heads["q"] = self._rotated(heads["q"], node, "q", context.rows)
        if "k" in heads:
            v = normalised(self.v_norm, "head", heads["v"], node.get("v_norm", {}))
            heads |= {"k": self._rotated(heads["k"], node, "k", context.rows), "v": clipped(v, self.clip)}
        return heads

    def _rotated(self, heads: Heads, node: Tree, name: Literal["q", "k"], rows: Rows) -> Heads:
        """Queries or keys, normalised where the model does that, and rotated."""
        norm, params = self.qk_norm, node.get(f"{name}_norm", {})
        if not self.qk_norm_after_rope:
            heads = normalised(norm, self.qk_norm_over, heads, params)
        heads = clipped(heads, self.clip)
        if self.rope is not None:
            heads = rotate(heads, *rows.angles[self.rope], interleaved=self.rope.interleaved)
        if self.qk_norm_after_rope:
            heads = normalised(norm, self.qk_norm_over, heads, params)
        if name == "q" and self.long_query is not None:
            heads = self.long_query(heads, rows.positions)
        return checkpoint_name(heads, ROTATED)
