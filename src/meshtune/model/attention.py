"""Grouped-query self-attention, for whole rows, for chunks of rows and over a cache."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree
from meshtune.kernels.attention import AttentionRequest, StackedCaches, attention
from meshtune.model.block import SHARED, Activation, Context, Cost, Divisor, Hidden, Mixer, Output, RowParams
from meshtune.model.cache import BY_HEAD, LayerCache
from meshtune.model.compute import Compute
from meshtune.model.inputs import SequenceInfo
from meshtune.model.linear import linear, linear_params, site_key
from meshtune.model.norm import NormSpec
from meshtune.model.rope import RopeSpec, rotate


@dataclasses.dataclass(frozen=True)
class AlibiSpec:
    """Attention with linear biases (https://arxiv.org/abs/2108.12409): a score loses its head's slope, one of `slopes`,
    for every position from query back to key."""

    slopes: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class LongQuerySpec:
    """Queries that grow with their position: multiplied by 1 + beta * ln(1 + floor((position + offset) / length)).

    Ministral 3 has them, and the layers of Llama 4 without rotary positions.
    """

    beta: float
    length: int
    offset: int = 0

    def __call__(self, q: Float[Array, "B T H h"], positions: Int[Array, "B T"]) -> Float[Array, "B T H h"]:
        """Computed in float32, in q's dtype."""
        steps = jnp.floor((positions.astype(jnp.float32) + self.offset) / self.length)
        return (q.astype(jnp.float32) * (1 + self.beta * jnp.log1p(steps))[:, :, None, None]).astype(q.dtype)


MOST_CHUNKS = 1 << 16  # of a document, where attention is chunked: segments are counted in int32

# The positions and segments [B, S] of the tokens that are attended to.
Past = tuple[Int[Array, "B S"], Int[Array, "B S"]]


def attend(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B S K h"],
    v: Float[Array, "B S K h"],
    rows: SequenceInfo,
    past: Past | None,
    compute: Compute,
    *,
    chunk: int | None = None,
    reaches: bool = False,
    prefix: bool = False,
    **options: Any,
) -> Float[Array, "B T H h"]:
    """Attention of the tokens `rows` to those of `past`, None for themselves.

    With `reaches` tokens see as far as rows.reach, where there is one; with `prefix` those that have one see all tokens
    before them, whatever the window. With `chunk` a token sees only its own part of its document, each of that many
    tokens. `options` are arguments of the kernels: scale, window, softcap, causal, slopes, sinks, caches.
    """
    kv_positions, kv_segments = (rows.positions, rows.segment_ids) if past is None else past
    positions = {"q_positions": rows.positions, "kv_positions": kv_positions}
    segments = {"q_segments": rows.segment_ids, "kv_segments": kv_segments, "q_parents": rows.parent_ids}
    if chunk is not None:
        segments = _chunk_segments(positions, segments, chunk)
    reach, window = rows.reach if reaches else None, options.get("window")
    if reach is not None:
        if prefix and window is not None:  # which no token of the prefix is beyond from such a position
            positions["q_positions"] = jnp.where(reach > 0, jnp.minimum(rows.positions, window - 1), rows.positions)
        reach = jnp.maximum(reach, rows.positions)
    options |= {"aligned": past is None and options.get("causal", True) and reach is None, "q_reach": reach}
    options |= {"packed": compute.packed or chunk is not None}
    sharding = None if compute.layout is None else compute.layout.attention_sharding()
    devices = {"backend": compute.attention, "platform": compute.platform, "chip": compute.chip, "sharding": sharding}
    return attention(q, k.astype(q.dtype), v.astype(q.dtype), **positions, **segments, **devices, **options)


def _stacked_caches(cache: LayerCache) -> StackedCaches | None:
    """The arrays that a layer's keys and values are part of, for kernels that read them there."""
    k, v = cache.stacked("k"), cache.stacked("v")
    return None if k is None or v is None else StackedCaches(k, v, cache.index)


def _within_windows(rows: SequenceInfo) -> SequenceInfo:
    """The rows of a tower whose tokens attend within windows."""
    assert rows.windows is not None, "rows of a tower with windows"
    return dataclasses.replace(rows, segment_ids=rows.windows)


def _chunk_segments(
    positions: dict[str, Array], segments: dict[str, Array | None], chunk: int
) -> dict[str, Array | None]:
    """The segments of each array of tokens, cut into chunks."""
    by_tokens = {name: positions["kv_positions" if name == "kv_segments" else "q_positions"] for name in segments}
    return {
        name: None if ids is None else chunked_segment_ids(by_tokens[name], ids, chunk)
        for name, ids in segments.items()
    }


def recall(
    cache: LayerCache, new: dict[str, Array], rows: SequenceInfo, reach: int | None
) -> tuple[dict[str, Array], Past, LayerCache]:
    """(arrays of all tokens that the new ones may see, their positions and segments, the next cache)."""
    past_arrays, positions, following = cache.recall(new, rows.positions, rows.segment_ids > 0, reach)
    return past_arrays, (jnp.maximum(positions, 0), (positions >= 0).astype(jnp.int32)), following


def chunked_segment_ids(positions: Array, segments: Array, chunk: int) -> Array:
    """Gives every chunk of a document its own segment id."""
    return jnp.where(segments > 0, segments * MOST_CHUNKS + positions // chunk, 0)


def attention_activations(
    queries: tuple[int, int], keys: tuple[int, int] | None, axis: str, gates: int = 0
) -> tuple[Activation, ...]:
    """The arrays of a token: queries, `gates` as wide as they, keys, values, the result and its log-sum-exp.

    `queries` and `keys` are (numbers of all heads, heads); values are as wide as keys, and `axis` is theirs. `keys` is
    None where keys and values are those of another layer.
    """
    H, heads = queries
    past = () if keys is None else (Activation(axis, *keys, kept=True, elementwise=2, whole_rows=True),) * 2
    return (
        Activation("heads", H, heads, kept=True, elementwise=2),
        *(Activation("heads", H, heads, kept=True, elementwise=1),) * gates,
        *past,
        Activation("heads", H, heads, kept=True),
        # The log-sum-exp of every head's scores, in float32.
        Activation("heads", heads, heads, kept=True, products=0, itemsize=4),
    )


def kernel_request(
    rows: tuple[int, int, int],
    heads: tuple[int, int, int],
    compute: Compute,
    *,
    chunk: int | None = None,
    **options: Any,
) -> AttentionRequest:
    """The kernels' request for `rows` (their number, tokens that attend and tokens that are attended to in each) with
    `heads` (of queries, of keys and values, numbers in each).

    `chunk` is that of `attend`; `options` are fields of AttentionRequest.
    """
    batch, q_length, kv_length = rows
    count, kv_heads, head_dim = heads
    return AttentionRequest(
        batch=batch,
        q_length=q_length,
        kv_length=kv_length,
        heads=count,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=compute.dtype,
        platform=compute.platform or jax.default_backend(),
        chip=compute.chip,
        packed=compute.packed or chunk is not None,
        parents=compute.shared_prompts,
        aligned=q_length == kv_length and options.get("causal", True) and not options.get("reaches", False),
        **options,
    )


PACKED = "packed_heads"  # the logical axis of rows of queries, keys and values, head by head

Heads = Float[Array, "B T H h"]

# What a norm of queries and keys extends over: a head, all with the same weights or each with its own, or all heads.
NormOver = Literal["head", "own_head", "vector"]


def unpack_heads(qkv: Float[Array, "B T n"], group: int, head_dim: int, parts: tuple[str, ...]) -> dict[str, Heads]:
    """Takes `parts` of "q", "k" and "v" out of `qkv`, which has `group` queries, a key and a value a key-value head."""
    flat = (*qkv.shape[:2], -1)
    qkv = qkv.reshape(*flat, group + 2, head_dim)
    q = qkv[:, :, :, :group].reshape(*flat, head_dim)
    heads = {"q": q, "k": qkv[:, :, :, group], "v": qkv[:, :, :, group + 1]}
    return {part: heads[part] for part in parts}


def head_norm_params(norm: NormSpec, over: NormOver, heads: tuple[int, str], head_dim: int) -> Tree:
    """The parameters of the norm of queries or keys; `heads` is their number with its logical axis."""
    count, axis = heads
    match over:
        case "head":
            return norm.params(head_dim, "head_dim")
        case "own_head":
            return norm.params(head_dim, "head_dim", heads)
        case "vector":
            return norm.params(count * head_dim, axis)


def normalise_heads(norm: NormSpec, over: NormOver, heads: Heads, params: Tree) -> Heads:
    """Normalises queries, keys or values over a head, or over all heads."""
    if over != "vector":
        return norm(heads, params)
    return norm(heads.reshape(*heads.shape[:2], -1), params).reshape(heads.shape)


ROTATED = "rotated"  # what a rematerialisation policy may keep: queries and keys, rotated


@dataclasses.dataclass(frozen=True)
class AttentionSpec(Mixer):
    """Softmax attention of H query heads over K key-value heads of h numbers each.

    Positions are rotary (`rope`), biases (`alibi`) or absent. `window` is the sliding window in tokens (None: the whole
    past), `softcap` squashes scores by tanh, `scale` multiplies them (None: h ** -0.5). `qk_norm` normalises queries
    and keys (`qk_norm_over`), before they are rotated or after (`qk_norm_after_rope`); `clip` limits the numbers of
    queries, keys and values to [-clip, clip] after that norm. `long_query` makes queries grow with their position.
    With `sinks` every head has a trained score that takes part in its softmax and has no value. With `chunk` a token
    sees only its own part of its document; every part is that many tokens long.
    The result is multiplied by the sigmoid of a gate, computed from the input (`gate="input"`), or along with each
    head's queries by the same projection (`gate="query"`). With `packed` one projection `qkv` [(H + 2 K) h, D] computes
    queries, keys and values: for each key-value head the rows of its queries, of keys and of values, so that tp, which
    splits the rows, gives every device whole heads. With `v_of_k` values are the result of the keys' projection,
    neither normalised nor rotated as keys are; `v_norm` normalises values. A layer `stores` its keys and values under a
    name for later layers, each of which `reads` them in place of computing keys and values, and has a cache of none.
    With `causal` False tokens see the later ones of their segment too, as in a vision tower, and with `windowed` those
    of their window of a picture only. With `reaches` tokens of a picture in the text see each other both ways; with
    `prefix` so do all tokens of a document up to the answer, in windows too. `clipped` is that of linear_params, for
    all projections.
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
    causal: bool = True
    windowed: bool = False
    reaches: bool = False
    prefix: bool = False
    clipped: bool = False
    name: ClassVar[str] = "attn"

    def __post_init__(self):
        assert self.gate is None or not self.packed, "packed projections have no gate"
        assert not self.clipped or not (self.packed or self.gate), "plain projections are clipped"
        assert not self.packed or not (self.v_of_k or self.reads or self.v_norm), "packed projections have values"
        assert self.reads is None or self.stores is None, "keys and values that are read are already stored"
        assert not self.qk_norm_after_rope or self.qk_norm_over != "vector", "heads are rotated one by one"
        assert self.heads % self.kv_heads == 0, "key-value heads must divide the heads"

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        return () if self.rope is None else (self.rope,)

    def params(self, embed: int) -> Tree:
        """q [H h, D] ([2 H h, D] with a gate for each query), k and v [K h, D], or qkv; o [D, H h], gate [H h, D],
        and the norms of queries and keys."""
        d, H, K = (embed, "embed"), self.heads * self.head_dim, self.kv_heads * self.head_dim
        if self.packed:
            tree = {"qkv": linear_params((H + 2 * K, PACKED), d, self.qkv_bias, self.head_dim)}
        else:
            width = 2 if self.gate == "query" else 1
            tree = {
                "q": linear_params((width * H, "heads"), d, self.qkv_bias, width * self.head_dim, self.clipped),
                "k": linear_params((K, "kv_heads"), d, self.qkv_bias, self.head_dim, self.clipped),
                "v": linear_params((K, "kv_heads"), d, self.qkv_bias, clipped=self.clipped),
            }
            absent = ("k", "v") if self.reads is not None else ("v",) if self.v_of_k else ()
            tree = {name: params for name, params in tree.items() if name not in absent}
        tree["o"] = linear_params(d, (H, "heads"), self.out_bias, clipped=self.clipped)
        if self.gate == "input":
            tree["gate"] = linear_params((H, "heads"), d, bias=False)
        if self.sinks:
            tree["sinks"] = {"weight": ArraySpec((self.heads,), "float32", ("heads",), "zeros", role="vector")}
        norms: dict[str, tuple[NormSpec | None, NormOver, tuple[int, str]]] = {
            "q": (self.qk_norm, self.qk_norm_over, (self.heads, "heads"))
        }
        if self.reads is None:
            kv_heads = (self.kv_heads, "kv_heads")
            norms |= {"k": (self.qk_norm, self.qk_norm_over, kv_heads), "v": (self.v_norm, "head", kv_heads)}
        for part, (norm, over, heads) in norms.items():
            if norm is not None:
                tree[f"{part}_norm"] = head_norm_params(norm, over, heads, self.head_dim)
        return {name: node for name, node in tree.items() if node}

    @property
    def _kv_projections(self) -> tuple[str, ...]:
        return () if self.reads is not None else ("k",) if self.v_of_k else ("k", "v")

    def apply(self, x: Hidden, node: Tree, context: Context, cache: LayerCache | None = None) -> Output:
        """Attention and its output projection."""
        past, stored, caches = None, {}, None
        if context.memory is not None or self.reads is not None:
            qkv, past = self._read_memory(x, node, context)
        else:
            qkv = self.project(x, node, context, ("q", "k", "v"))
            if cache is not None:
                past_kv, past, cache = recall(cache, {"k": qkv["k"], "v": qkv["v"]}, context.sequences, self._reach)
                qkv, caches = qkv | past_kv, _stacked_caches(cache)
            if self.stores is not None:
                memory = {"k": qkv["k"], "v": qkv["v"]}
                stored = {self.stores: memory if past is None else memory | {"past": past}}
        rows = _within_windows(context.sequences) if self.windowed else context.sequences
        options: dict[str, Any] = self._score_options() | {"chunk": self.chunk, "caches": caches}
        options["prefix"] = self.prefix
        if self.alibi is not None or self.sinks:
            options |= self._score_arrays(node)
        mixed = attend(qkv["q"], qkv["k"], qkv["v"], rows, past, context.compute, **options)
        if self.gate is not None:
            mixed = mixed * jax.nn.sigmoid(qkv["gate"].astype(jnp.float32)).astype(mixed.dtype)
        mixed = mixed.reshape(*mixed.shape[:2], -1)
        return Output(linear(mixed, node["o"], site_key(context.key, "o")), cache, {}, stored)

    def _read_memory(self, x: Hidden, node: Tree, context: Context) -> tuple[dict[str, Any], Past | None]:
        """(queries, with keys and values of whole rows or of an earlier layer; the tokens of these)."""
        queries = self.project(x, node, context, ("q",))
        if context.memory is not None:
            memory, rows = context.memory
            return queries | memory, (rows.positions, rows.segment_ids)
        assert self.reads is not None
        memory = context.side[SHARED][self.reads]
        return queries | memory, memory.get("past")

    def memory(self, x: Hidden, node: Tree, context: Context) -> Tree:
        """Keys and values [B, T, K, h]."""
        return self.project(x, node, context, ("k", "v"))

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
        return kernel_request(
            (rows, q_length, kv_length),
            (self.heads, self.kv_heads, self.head_dim),
            compute,
            chunk=self.chunk,
            alibi=self.alibi is not None,
            sinks=self.sinks,
            **self._score_options(),
        )

    @property
    def _reach(self) -> int | None:
        """The greatest number of tokens that one sees; None without a limit."""
        limits = () if self.prefix else (self.window, self.chunk)
        return min((limit for limit in limits if limit is not None), default=None)

    def _score_options(self) -> dict[str, Any]:
        """Options of scores, for the kernel that runs and for the request that is asked about."""
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        return {"scale": scale} | {name: getattr(self, name) for name in ("window", "softcap", "causal", "reaches")}

    def _score_arrays(self, node: Tree) -> dict[str, Array | None]:
        slopes = None if self.alibi is None else jnp.asarray(self.alibi.slopes, jnp.float32)
        return {"slopes": slopes, "sinks": node["sinks"]["weight"] if self.sinks else None}

    def project(self, x: Hidden, node: Tree, context: Context, parts: tuple[str, ...]) -> dict[str, Heads]:
        """Queries "q" [B, T, H, h], keys "k" and values "v" [B, T, K, h] for the kernels; with "q" their gate."""
        key, heads = context.key, (*x.shape[:2], -1, self.head_dim)
        if self.packed:
            packed = linear(x, node["qkv"], site_key(key, "qkv"))
            qkv = unpack_heads(packed, self.heads // self.kv_heads, self.head_dim, parts)
        elif self.gate is not None or self.v_of_k:
            qkv = self._project_gated(x, node, key, parts)
        else:
            qkv = {part: linear(x, node[part], site_key(key, part)).reshape(heads) for part in parts}
        if "v" in qkv and (self.v_norm is not None or self.clip is not None):
            qkv["v"] = self._limit_values(qkv["v"], node)
        rotated = {part: self._rotate(qkv[part], node, part, context.sequences) for part in ("q", "k") if part in qkv}
        return qkv | rotated

    def _project_gated(self, x: Hidden, node: Tree, key: Array | None, parts: tuple[str, ...]) -> dict[str, Heads]:
        """Projects queries with their gate, which has a projection or the second half of the rows of each head's
        queries; keys; and values, which may be the keys as they are projected."""

        def heads_of(name: str, size: int) -> Heads:
            return linear(x, node[name], site_key(key, name)).reshape(*x.shape[:2], -1, size)

        # Queries first: in the order of these products their gradients of x are added, which decides the last bits.
        qkv: dict[str, Heads] = {}
        if "q" in parts and self.gate == "query":
            qkv["q"], qkv["gate"] = jnp.split(heads_of("q", 2 * self.head_dim), 2, axis=-1)
        elif "q" in parts:
            qkv["q"] = heads_of("q", self.head_dim)
            qkv |= {"gate": heads_of("gate", self.head_dim)} if self.gate == "input" else {}
        qkv |= {part: heads_of(part, self.head_dim) for part in parts if part in self._kv_projections}
        return qkv if "v" not in parts or not self.v_of_k else qkv | {"v": qkv["k"]}

    def _limit_values(self, values: Heads, node: Tree) -> Heads:
        if self.v_norm is not None:
            values = normalise_heads(self.v_norm, "head", values, node.get("v_norm", {}))
        return values if self.clip is None else jnp.clip(values, -self.clip, self.clip)

    def _rotate(self, heads: Heads, node: Tree, part: str, rows: SequenceInfo) -> Heads:
        """Rotates queries or keys; normalises and limits them where the model does that."""
        params = node.get(f"{part}_norm", {})
        if self.qk_norm is not None and not self.qk_norm_after_rope:
            heads = normalise_heads(self.qk_norm, self.qk_norm_over, heads, params)
        if self.clip is not None:
            heads = jnp.clip(heads, -self.clip, self.clip)
        if self.rope is not None:
            heads = rotate(heads, *rows.angles[self.rope], interleaved=self.rope.interleaved)
        if self.qk_norm is not None and self.qk_norm_after_rope:
            heads = normalise_heads(self.qk_norm, self.qk_norm_over, heads, params)
        if part == "q" and self.long_query is not None:
            heads = self.long_query(heads, rows.positions)
        return checkpoint_name(heads, ROTATED)
