"""What is asked of an attention backend, known before anything is computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax


@dataclasses.dataclass(frozen=True)
class AttentionRequest:
    """The static facts of one call: all that a backend needs to say whether it can serve.

    Lengths are in tokens (q_length is T, kv_length is S). `aligned` promises that T == S and that no token sees one
    that stands after it in the row. `platform` is the JAX platform the program is traced for.
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


@dataclasses.dataclass(frozen=True)
class AttentionInputs:
    """The arrays of one call: q [B,T,H,h], k and v [B,S,K,h]; positions and segments int32 [B,T] and [B,S]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    q_positions: jax.Array
    kv_positions: jax.Array
    q_segments: jax.Array
    kv_segments: jax.Array


class Run(Protocol):
    def __call__(self, inputs: AttentionInputs, request: AttentionRequest) -> jax.Array: ...


def _always(request: AttentionRequest) -> str | None:
    return None


@dataclasses.dataclass(frozen=True)
class Backend:
    """One way to compute attention.

    `supports` says why a request cannot be served (None: it can); a forced backend obeys it too.
    `suits` says why the automatic choice should look further although the request could be served (None: take it).
    `run` returns [B,T,H,h] in q's dtype.
    """

    name: str
    run: Run
    supports: Callable[[AttentionRequest], str | None] = _always
    suits: Callable[[AttentionRequest], str | None] = _always
