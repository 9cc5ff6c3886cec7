"""What an attention backend is asked to compute: the static facts of a call, and its arrays."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax


@dataclasses.dataclass(frozen=True)
class AttentionRequest:
    """The static facts of one call: everything a backend needs to say whether it can serve it.

    Lengths are in tokens (q_length is T, kv_length is S). `aligned` promises that T == S and that no token sees one
    that comes after it in the row: within a document, whose tokens are contiguous, positions rise by one. `platform` is
    the JAX platform that the program is traced for, `chip` the architecture of its devices ("": this process's first
    device; see chips). `packed=False` promises that a row is one document followed by padding. `alibi` says that the
    inputs have slopes, `sinks` that they have sinks. On a mesh all sizes are those of one device, and `ring` is the
    number of devices that a row is sharded over (1: each device has whole rows of keys).
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


class AttentionInputs(NamedTuple):
    """The arrays of one call: q [B,T,H,h], k and v [B,S,K,h]; positions and segments int32 [B,T] and [B,S].

    `slopes` float32 [H] are ALiBi's: what a score loses for each position between query and key. None without ALiBi.
    `sinks` [H] are scores that take part in every softmax and have no value. None without sinks.
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
