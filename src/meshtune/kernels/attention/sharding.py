"""How a mesh shards attention: which axes split rows, heads and tokens, and what each device computes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from meshtune.kernels.attention.request import AttentionInputs, AttentionRequest
from meshtune.kernels.chips import arch_of


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

    def fitted(self, request: AttentionRequest) -> AttentionSharding:
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
        in_specs = (queries, keys, keys, *[tokens] * 4, self.of_heads, self.of_heads, *extra_in_specs)
        # Results that are replicated are computed identically on several devices, which the check cannot verify through
        # loops whose carries start from constants.
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
