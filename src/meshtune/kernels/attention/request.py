"""What is asked of an attention backend, known before anything is computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import jax

if TYPE_CHECKING:
    from meshtune.kernels.attention.split import AttentionSplit


@dataclasses.dataclass(frozen=True)
class AttentionRequest:
    """The static facts of one call: all that a backend needs to say whether it can serve.

    Lengths are in tokens (q_length is T, kv_length is S). `aligned` promises that T == S and that no token sees one
    that stands after it in the row: positions rise by one within a document, whose tokens stand together. `platform` is
    the JAX platform the program is traced for, `chip` the arch of its devices ("": the first device here; see chips).
    `packed=False` promises that a row is one document and then padding. `alibi` says that the inputs have slopes.
    Over a mesh all sizes are those of one device, and `ring` is the number of devices that hold a row's parts in turn
    (1: each device has whole rows of keys).
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


class AttentionInputs(NamedTuple):
    """The arrays of one call: q [B,T,H,h], k and v [B,S,K,h]; positions and segments int32 [B,T] and [B,S].

    `slopes` float32 [H]: what a score loses for every position from query back to key (ALiBi), or None.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    q_positions: jax.Array
    kv_positions: jax.Array
    q_segments: jax.Array
    kv_segments: jax.Array
    slopes: jax.Array | None = None


class Run(Protocol):
    def __call__(self, inputs: AttentionInputs, request: AttentionRequest) -> jax.Array: ...


class RunOverMesh(Protocol):
    def __call__(self, inputs: AttentionInputs, request: AttentionRequest, split: AttentionSplit) -> jax.Array: ...


NO_BIASES = "its kernels have no biases by distance (ALiBi)"


def _always(request: AttentionRequest) -> str | None:
    return None


@dataclasses.dataclass(frozen=True)
class Backend:
    """One way to compute attention.

    `supports` says why a request cannot be served (None: it can); a forced backend obeys it too.
    `suits` says why the automatic choice should look further although the request could be served (None: take it).
    `run` returns [B,T,H,h] in q's dtype, on one device: over a mesh each device runs it on its rows and heads.
    `over_mesh` is for a backend that goes over the mesh itself, with whole arrays, a split that divides them and the
    request of one device. Without it a backend serves no ring.
    """

    name: str
    run: Run
    supports: Callable[[AttentionRequest], str | None] = _always
    suits: Callable[[AttentionRequest], str | None] = _always
    over_mesh: RunOverMesh | None = None

    def refusal(self, request: AttentionRequest) -> str | None:
        """Why it cannot serve."""
        if request.ring > 1 and self.over_mesh is None:
            return f"it does not pass keys on between {request.ring} devices (mesh.cp)"
        return self.supports(request)
