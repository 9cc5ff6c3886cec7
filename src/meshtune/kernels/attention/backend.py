"""The interface of an attention backend: whether it can serve a request, whether it is a good choice, and its code."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax

from meshtune.kernels.attention.request import AttentionInputs, AttentionRequest
from meshtune.kernels.attention.sharding import AttentionSharding
from meshtune.translatable import Translatable

NO_SINKS = Translatable("its kernels have no sinks")
NO_ALIBI = Translatable("its kernels have no biases by distance (ALiBi)")


class Attend(Protocol):
    """Attention on one device: [B,T,H,h] in q's dtype."""

    def __call__(self, inputs: AttentionInputs, request: AttentionRequest) -> jax.Array: ...


class AttendSharded(Protocol):
    """Attention over a mesh: takes global arrays, a fitted sharding, and the request of one device."""

    def __call__(
        self, inputs: AttentionInputs, request: AttentionRequest, sharding: AttentionSharding
    ) -> jax.Array: ...


def _no_reason(request: AttentionRequest) -> str | None:
    return None


@dataclasses.dataclass(frozen=True)
class Backend:
    """One implementation of attention.

    `supports` returns the reason a request cannot be served, or None; a forced backend obeys it too.
    `suits` returns the reason the automatic choice should prefer another backend, or None.
    `hardware` says whether it runs on such devices at all.
    `run` computes on one device; on a mesh every device runs it on its own rows and heads.
    `run_sharded` is for backends that handle the mesh themselves; without it a backend cannot serve a ring.
    """

    name: str
    run: Attend
    supports: Callable[[AttentionRequest], str | None] = _no_reason
    suits: Callable[[AttentionRequest], str | None] = _no_reason
    run_sharded: AttendSharded | None = None
    hardware: Callable[[AttentionRequest], bool] = lambda request: True

    def refusal(self, request: AttentionRequest) -> str | None:
        """The reason it cannot serve the request, or None."""
        if request.ring > 1 and self.run_sharded is None:
            return Translatable("it does not pass keys on between {devices} devices (mesh.cp)", devices=request.ring)
        return self.supports(request)


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
