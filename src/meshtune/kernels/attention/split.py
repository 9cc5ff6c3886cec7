"""Attention over a mesh: which axes split what, and a backend run on each device's own rows and heads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from meshtune.kernels.attention.request import AttentionInputs, AttentionRequest, Backend
from meshtune.kernels.chips import arch_of


@dataclasses.dataclass(frozen=True)
class AttentionSplit:
    """The mesh axes that split rows (B), query heads (H), key heads (K) and tokens (T) of attention.

    None, and axes of size 1, split nothing. `kv_heads` is `heads` or None: with None, keys and values are whole on
    every device although query heads may be split, and a device takes the key heads that its query heads read.
    `length` makes a ring of aligned rows: every device holds a part of the queries and of the keys. It never splits a
    cache.
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
        """The JAX platform of the mesh's devices, which need not be that of this process."""
        return self.mesh.devices.flat[0].platform if isinstance(self.mesh, Mesh) else jax.default_backend()

    @property
    def chip(self) -> str:
        """The arch of the mesh's devices (see chips), "" where it has none or they do not say."""
        return arch_of(self.mesh.devices.flat[0]) if isinstance(self.mesh, Mesh) else ""

    def fitted(self, request: AttentionRequest) -> AttentionSplit:
        """The axes that do split these sizes. What an axis does not divide is not split by it."""

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
        """What one device is asked, for a split that is `fitted` to `request`."""
        ring, heads = self.size(self.length), request.heads // self.size(self.heads)
        if self._takes_key_heads:
            # Runs of query heads that read one key head. Where every device's query heads read few whole groups, or
            # a part of one, these are all that read it; only otherwise is a key head there for more than one run.
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

    def own_key_heads(self, x: jax.Array, request: AttentionRequest) -> jax.Array:
        """Inside shard_map: of keys or values [B,S,K,h] those that this device's query heads read."""
        return x if not self._takes_key_heads else jnp.take(x, self._own(x.shape[2], request), axis=2)

    def sum_key_heads(self, x: jax.Array, kv_heads: int, request: AttentionRequest) -> jax.Array:
        """Inside shard_map, the transpose of `own_key_heads`: the gradient of all `kv_heads` from all devices."""
        if not self._takes_key_heads:
            return x
        whole = jnp.zeros((*x.shape[:2], kv_heads, x.shape[3]), x.dtype)
        return jax.lax.psum(whole.at[:, :, self._own(kv_heads, request)].add(x), self.heads)

    @property
    def _takes_key_heads(self) -> bool:
        return self.heads is not None and self.kv_heads is None

    def _own(self, kv_heads: int, request: AttentionRequest) -> jax.Array:
        """Which key head each of this device's (`request.kv_heads`) is, by its query heads' numbers in the model."""
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


def run_over_mesh(backend: Backend, inputs: AttentionInputs, request: AttentionRequest, split: AttentionSplit):
    """`backend` on every device's own rows and heads. `split` is fitted, and `request` that of one device."""
    if backend.over_mesh is not None:
        return backend.over_mesh(inputs, request, split)
    assert split.length is None, f"{backend.name} in a ring"

    def here(*arrays: Any) -> jax.Array:
        mine = AttentionInputs(*arrays)
        k, v = (split.own_key_heads(x, request) for x in (mine.k, mine.v))
        return backend.run(mine._replace(k=k, v=v), request)

    return over_mesh(here, split, (), split.specs[0])(*inputs)


def over_mesh(function: Callable[..., Any], split: AttentionSplit, more_in: tuple[Any, ...], out: Any):
    """`function` of the arrays of AttentionInputs, then of arrays with the specs `more_in`, on each device."""
    queries, keys, tokens = split.specs
    in_specs = (queries, keys, keys, *[tokens] * 4, PartitionSpec(split.heads), *more_in)
    # What is whole on several devices is the same there because they compute the same, which the check cannot see
    # through loops whose carries start from constants.
    return jax.shard_map(function, mesh=split.mesh, in_specs=in_specs, out_specs=out, check_vma=False)
