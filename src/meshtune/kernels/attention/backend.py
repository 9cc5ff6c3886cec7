"""The interface of an attention backend: requests, arrays, the rules of visibility that all share, and meshes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from meshtune.errors import UserError
from meshtune.kernels.chips import arch_of
from meshtune.translatable import Translatable


@dataclasses.dataclass(frozen=True)
class AttentionRequest:
    """The static facts of one call: everything a backend needs to say whether it can serve it.

    Lengths are in tokens (q_length is T, kv_length is S). `aligned` promises that T == S and that no token sees one
    that comes after it in the row: within a document, whose tokens are contiguous, positions rise by one. `platform` is
    the JAX platform that the program is traced for, `chip` the architecture of its devices ("": this process's first
    device; see chips). `packed=False` promises that a row is one document followed by padding. `alibi` says that the
    inputs have slopes, `sinks` that they have sinks. On a mesh all sizes are those of one device, and `ring` is the
    number of devices that a row is sharded over (1: each device has whole rows of keys). `causal=False` lets a token
    see the later ones of its segment too; it has no window and no biases by distance. `parents` says that the inputs
    have the segments that queries' segments continue, `reaches` that they have the last position that each query sees.
    """

    batch: int
    q_length: int
    kv_length: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    platform: str
    scale: float
    window: int | None = None
    softcap: float | None = None
    aligned: bool = False
    ring: int = 1
    chip: str = ""
    packed: bool = True
    alibi: bool = False
    sinks: bool = False
    causal: bool = True
    parents: bool = False
    reaches: bool = False


class AttentionInputs(NamedTuple):
    """The arrays of one call: q [B,T,H,h], k and v [B,S,K,h]; positions and segments int32 [B,T] and [B,S].

    `slopes` float32 [H] are ALiBi's: what a score loses for each position between query and key. None without ALiBi.
    `sinks` [H] are scores that take part in every softmax and have no value. None without sinks.
    `q_parents` int32 [B,T] are the segments that queries' segments continue (0: none), whose tokens come before them in
    the row: queries see their tokens too. None where no segment continues another.
    `q_reach` int32 [B,T] are the last positions that queries see, their own or later: tokens of a picture see each
    other both ways. None where that is their own.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    q_positions: jax.Array
    kv_positions: jax.Array
    q_segments: jax.Array
    kv_segments: jax.Array
    slopes: jax.Array | None = None
    sinks: jax.Array | None = None
    q_parents: jax.Array | None = None
    q_reach: jax.Array | None = None


class StackedCaches(NamedTuple):
    """Keys and values of all layers, head by head, and the number of the layer that attends."""

    k: Float[Array, "L B K S h"]
    v: Float[Array, "L B K S h"]
    layer: Array | int


NO_SINKS = Translatable("its kernels have no sinks")
NO_ALIBI = Translatable("its kernels have no biases by distance (ALiBi)")
NO_PARENTS = Translatable("its kernels show a token its own segment only, not the prompt that it continues")
NO_REACHES = Translatable("its kernels hide the later tokens of a picture from the earlier ones")
ONLY_CAUSAL = Translatable("its kernels hide later tokens from earlier ones")


class Attend(Protocol):
    """Attention on one device: [B,T,H,h] in q's dtype."""

    def __call__(self, inputs: AttentionInputs, request: AttentionRequest) -> jax.Array: ...


class AttendSharded(Protocol):
    """Attention over a mesh: takes global arrays, a fitted sharding, and the request of one device."""

    def __call__(
        self, inputs: AttentionInputs, request: AttentionRequest, sharding: AttentionSharding
    ) -> jax.Array: ...


@dataclasses.dataclass(frozen=True)
class Backend:
    """One implementation of attention.

    `supports` returns the reason a request cannot be served, or None; a forced backend obeys it too.
    `suits` returns the reason the automatic choice should prefer another backend, or None. Without them there is none.
    `hardware` says whether it runs on such devices at all.
    `run` computes on one device; on a mesh every device runs it on its own rows and heads.
    `run_sharded` is for backends that handle the mesh themselves; without it a backend cannot serve a ring.
    """

    name: str
    run: Attend
    supports: Callable[[AttentionRequest], str | None] | None = None
    suits: Callable[[AttentionRequest], str | None] | None = None
    run_sharded: AttendSharded | None = None
    hardware: Callable[[AttentionRequest], bool] = lambda request: True

    def refusal(self, request: AttentionRequest) -> str | None:
        """The reason it cannot serve the request, or None."""
        if request.ring > 1 and self.run_sharded is None:
            return Translatable("it does not pass keys on between {devices} devices (mesh.cp)", devices=request.ring)
        return None if self.supports is None else self.supports(request)


def run_over_mesh(
    backend: Backend, inputs: AttentionInputs, request: AttentionRequest, sharding: AttentionSharding
) -> jax.Array:
    """`backend` on every device's own rows and heads; `sharding` is fitted, and `request` is that of one device."""
    if backend.run_sharded is not None:
        return backend.run_sharded(inputs, request, sharding)
    assert sharding.length is None, f"{backend.name} in a ring"

    def run_local(*arrays: jax.Array) -> jax.Array:
        return backend.run(sharding.with_local_key_heads(AttentionInputs(*arrays), request), request)

    return sharding.shard_map(run_local, (), sharding.specs[0])(*inputs)


# Replaces minus infinity, because the difference of two infinities would be NaN.
MASKED = -1e30
# A lower bound for a row's maximum score: exp(MASKED - LOWEST) is 0, and not 1, in a row whose scores are all masked.
LOWEST = 0.5 * MASKED


def visible(
    q_positions: Int[Array, "B T"],
    kv_positions: Int[Array, "B S"],
    q_segments: Int[Array, "B T"],
    kv_segments: Int[Array, "B S"],
    request: AttentionRequest,
    q_parents: Int[Array, "B T"] | None = None,
    q_reach: Int[Array, "B T"] | None = None,
) -> Bool[Array, "B T S"]:
    """True where a query sees a key: in the same segment (other than 0, padding) or in the one that it continues, not
    later than itself or what it reaches unless the request has no causality, and within its window."""
    distance = q_positions[:, :, None] - kv_positions[:, None, :]
    same_segment = (q_segments[:, :, None] == kv_segments[:, None, :]) & (q_segments != 0)[:, :, None]
    if q_parents is not None:
        same_segment |= (q_parents[:, :, None] == kv_segments[:, None, :]) & (q_parents != 0)[:, :, None]
    if not request.causal:
        return same_segment
    reached = distance >= 0 if q_reach is None else kv_positions[:, None, :] <= q_reach[:, :, None]
    earlier = same_segment & reached
    return earlier if request.window is None else earlier & (distance < request.window)


def cap_scores(scores: Float[Array, "*any"], softcap: float | None) -> Float[Array, "*any"]:
    """Scores squashed into (-softcap, softcap) by tanh, as in Gemma 2 (arXiv:2408.00118); unchanged without a cap."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def capped_derivative(scores: Float[Array, "*any"], softcap: float) -> Float[Array, "*any"]:
    """The derivative of `capped`, from its result `scores`."""
    return 1.0 - jax.lax.square(scores / softcap)


def alibi_biased(
    scores: Float[Array, "B K R S"],
    slopes: Float[Array, "K R"] | None,
    q_positions: Int[Array, "B R"],
    kv_positions: Int[Array, "B S"],
) -> Float[Array, "B K R S"]:
    """Scores minus their row's slope times the distance (ALiBi, arXiv:2108.12409); unchanged without slopes.

    Computed from the difference of two integer positions, so that it is exact however far into a row a document is.
    """
    if slopes is None:
        return scores
    negative_distance = (kv_positions[:, None, :] - q_positions[:, :, None]).astype(scores.dtype)
    return scores + slopes.astype(scores.dtype)[None, :, :, None] * negative_distance[:, None]


def accumulator(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of scores and sums: float32, or float64 for float64 inputs."""
    return jnp.promote_types(dtype, jnp.float32)


def matmul_precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """HIGHEST for float32, whose factors some chips would otherwise round to fewer bits."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


@dataclasses.dataclass(frozen=True)
class AttentionSharding:
    """The mesh axes that split rows (B), query heads (H), key heads (K) and tokens (T) of attention.

    None, and axes of size 1, split nothing. `kv_heads` is `heads` or None. With None, keys and values are replicated
    even if query heads are split, and each device selects the key heads that its query heads read. `length` makes a
    ring: every device holds a shard of the queries and of the keys of aligned rows. It never splits a cache.
    """

    mesh: Mesh | AbstractMesh
    batch: tuple[str, ...] = ()
    heads: str | None = None
    kv_heads: str | None = None
    length: str | None = None

    def size(self, *axes: str | None) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes if axis is not None)

    @property
    def platform(self) -> str:
        """The JAX platform of the mesh's devices, which may differ from this process's default."""
        return self.mesh.devices.flat[0].platform if isinstance(self.mesh, Mesh) else jax.default_backend()

    @property
    def chip(self) -> str:
        """The architecture of the mesh's devices (see chips); "" if unknown."""
        return arch_of(self.mesh.devices.flat[0]) if isinstance(self.mesh, Mesh) else ""

    def fit(self, request: AttentionRequest) -> AttentionSharding:
        """Only those axes that divide the sizes of `request`: an axis that does not divide a size does not split it."""

        def splits(axis: str | None, *lengths: int) -> bool:
            return axis is not None and self.size(axis) > 1 and all(n % self.size(axis) == 0 for n in lengths)

        batch = tuple(axis for axis in self.batch if self.size(axis) > 1)
        heads = self.heads if splits(self.heads, request.heads) else None
        assert self.kv_heads in (None, self.heads), f"key heads split by {self.kv_heads}, heads by {self.heads}"
        return dataclasses.replace(
            self,
            batch=batch if request.batch % self.size(*batch) == 0 else (),
            heads=heads,
            kv_heads=heads if self.kv_heads is not None and splits(heads, request.kv_heads) else None,
            length=self.length if request.aligned and splits(self.length, request.q_length) else None,
        )

    def local(self, request: AttentionRequest) -> AttentionRequest:
        """The request of one device, for a split that is `fitted` to `request`."""
        ring, heads = self.size(self.length), request.heads // self.size(self.heads)
        if self._selects_key_heads:
            # Consecutive query heads that read one key head form a run. If a device's query heads are a few whole
            # groups, or a part of one, a run is all of its query heads that read a key head; otherwise a key head is
            # selected once for each of its runs.
            kv_heads = heads // math.gcd(heads, request.heads // request.kv_heads)
        else:
            kv_heads = request.kv_heads // self.size(self.kv_heads)
        return dataclasses.replace(
            request,
            batch=request.batch // self.size(*self.batch),
            q_length=request.q_length // ring,
            kv_length=request.kv_length // ring,
            heads=heads,
            kv_heads=kv_heads,
            ring=ring,
        )

    def with_local_key_heads(self, inputs: AttentionInputs, request: AttentionRequest) -> AttentionInputs:
        """Inside shard_map: `inputs` with only those key heads that this device's query heads read."""
        if not self._selects_key_heads:
            return inputs
        k, v = (jnp.take(x, self._key_head_indices(x.shape[2], request), axis=2) for x in (inputs.k, inputs.v))
        return inputs._replace(k=k, v=v)

    def sum_key_heads(self, x: jax.Array, kv_heads: int, request: AttentionRequest) -> jax.Array:
        """Inside shard_map, the transpose of `with_local_key_heads`: sums the gradient of all `kv_heads` key heads
        over devices."""
        if not self._selects_key_heads:
            return x
        zeros = jnp.zeros((*x.shape[:2], kv_heads, x.shape[3]), x.dtype)
        return jax.lax.psum(zeros.at[:, :, self._key_head_indices(kv_heads, request)].add(x), self.heads)

    @property
    def _selects_key_heads(self) -> bool:
        return self.heads is not None and self.kv_heads is None

    def _key_head_indices(self, kv_heads: int, request: AttentionRequest) -> jax.Array:
        """The index in the model of each of this device's `request.kv_heads` key heads."""
        group = request.heads * self.size(self.heads) // kv_heads
        run = request.heads // request.kv_heads
        first = jax.lax.axis_index(self.heads) * request.heads
        return (first + jnp.arange(request.kv_heads) * run) // group

    @property
    def specs(self) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec]:
        """Of queries [B,T,H,h], of keys [B,S,K,h], and of tokens [B,T] or [B,S]."""
        batch = self.batch or None
        return (
            PartitionSpec(batch, self.length, self.heads, None),
            PartitionSpec(batch, self.length, self.kv_heads, None),
            PartitionSpec(batch, self.length),
        )

    @property
    def of_heads(self) -> PartitionSpec:
        """Of arrays [H]."""
        return PartitionSpec(self.heads)

    def sum_over_tokens(self, x: jax.Array) -> jax.Array:
        """Inside shard_map: the sum over the devices that have other rows or other tokens of a row."""
        axes = (*self.batch, *(() if self.length is None else (self.length,)))
        return jax.lax.psum(x, axes) if axes else x

    def shard_map(
        self, function: Callable[..., Any], extra_in_specs: tuple[PartitionSpec, ...], out_specs: Any
    ) -> Callable[..., Any]:
        """Maps `function` over devices: its arguments are the fields of AttentionInputs, then arrays with the specs
        `extra_in_specs`."""
        queries, keys, tokens = self.specs
        in_specs = (queries, keys, keys, *[tokens] * 4, self.of_heads, self.of_heads, tokens, tokens)
        in_specs += extra_in_specs
        # Results that are replicated are computed identically on several devices, which the check cannot verify through
        # loops whose carries start from constants.
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def zigzag_order(length: int, parts: int) -> np.ndarray:
    """A permutation of 0..length-1, int32 [length], after which a row is cut into `parts` equal shards.

    A token attends to those before it, so with contiguous shards the last device has the most work and the ring waits
    for it. Here the row is cut into 2 * parts chunks, and device i holds an early and a late one: chunks i and
    2 * parts - 1 - i. (The imbalance is described by Brandon et al., Striped Attention, arXiv:2311.09431; this is the
    zig-zag order.) Apart from attention every operation treats tokens one by one, and attention uses only their
    positions and segments, which are permuted with them.
    Raises: UserError for a length that 2 * parts does not divide.
    """
    if parts == 1:
        return np.arange(length, dtype=np.int32)
    chunks = 2 * parts
    if length % chunks:
        nearest = [n for n in (length // chunks * chunks, -(-length // chunks) * chunks) if n]
        raise UserError(
            f"rows of {length} tokens cannot be cut into the {chunks} equal chunks that cp {parts} needs",
            where="mesh.cp",
            fix=f"make rows {' or '.join(map(str, nearest))} tokens long (any multiple of {chunks}), or change mesh.cp",
        )
    by_chunk = np.arange(length, dtype=np.int32).reshape(chunks, -1)
    return np.stack([by_chunk[:parts], by_chunk[: parts - 1 : -1]], 1).reshape(-1)
