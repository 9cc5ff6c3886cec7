"""Attention behind one function: a request describes the call, and the first backend that serves it computes it."""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array, Float, Int

from meshtune.errors import UserError, nearest
from meshtune.kernels.attention.backend import (
    AttentionInputs,
    AttentionRequest,
    AttentionSharding,
    Backend,
    StackedCaches,
    run_over_mesh,
    zigzag_order,
)
from meshtune.kernels.attention.blockwise import BLOCKWISE
from meshtune.kernels.attention.cudnn import CUDNN
from meshtune.kernels.attention.direct import DIRECT
from meshtune.kernels.attention.online_softmax import LOG_SUM_EXP, OUTPUT
from meshtune.kernels.attention.splash import SPLASH
from meshtune.kernels.attention.triton import TRITON, decode, decode_refusal
from meshtune.translatable import Translatable

__all__ = [
    "BACKENDS",
    "LOG_SUM_EXP",
    "OUTPUT",
    "AttentionInputs",
    "AttentionRequest",
    "AttentionSharding",
    "Backend",
    "StackedCaches",
    "attention",
    "choose_backend",
    "zigzag_order",
]

ASKED_FOR, FIRST_CHOICE = Translatable("asked for"), Translatable("first choice")  # reasons for a backend

# In order of preference for backend="auto". A new backend is one file and one line here.
BACKENDS: list[Backend] = [
    DIRECT,
    SPLASH,
    CUDNN,
    TRITON,
    BLOCKWISE,
]


def choose_backend(request: AttentionRequest, backend: str = "auto") -> tuple[Backend, str]:
    """The backend for `request`, and the reason for the choice (for the run's banner): why those before it do not
    serve.

    Raises: UserError if a forced backend is unknown or cannot serve the request, or if none can, with every backend's
    reason.
    """
    if backend != "auto":
        return _forced_backend(request, backend), ASKED_FOR
    reason = None
    for entry in BACKENDS:
        refusal = entry.refusal(request) or (None if entry.suits is None else entry.suits(request))
        if refusal is None:
            return entry, reason or FIRST_CHOICE
        if entry.hardware(request):  # of hardware that is not there, nobody can change anything
            rejected = Translatable("not {backend}: {reason}", backend=entry.name, reason=refusal)
            reason = rejected if reason is None else Translatable("{first}; {rest}", first=reason, rest=rejected)
    raise UserError(f"no attention backend can serve this model or batch: {_reasons(request)}")


def _forced_backend(request: AttentionRequest, backend: str) -> Backend:
    """The backend of this name, if it serves the request."""
    by_name = {entry.name: entry for entry in BACKENDS}
    if backend not in by_name:
        raise UserError(
            f"attention backend '{backend}' does not exist",
            fix=f"{nearest(backend, by_name)}choose one of auto, {', '.join(by_name)}",
        )
    if by_name[backend].refusal(request) is None:
        return by_name[backend]
    serving = [entry.name for entry in BACKENDS if entry.refusal(request) is None]
    raise UserError(
        f"attention backend '{backend}' cannot serve this model or batch: {_reasons(request)}",
        fix=f"choose auto{''.join(', ' + name for name in serving)}",
    )


def _reasons(request: AttentionRequest) -> str:
    refusals = {entry.name: entry.refusal(request) for entry in BACKENDS}
    return "; ".join(f"{name}: {reason}" for name, reason in refusals.items() if reason is not None)


def attention(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B S K h"],
    v: Float[Array, "B S K h"],
    *,
    q_positions: Int[Array, "B T"],
    kv_positions: Int[Array, "B S"],
    q_segments: Int[Array, "B T"],
    kv_segments: Int[Array, "B S"],
    slopes: Float[Array, "H"] | None = None,
    sinks: Float[Array, "H"] | None = None,
    q_parents: Int[Array, "B T"] | None = None,
    q_reach: Int[Array, "B T"] | None = None,
    caches: StackedCaches | None = None,
    backend: str = "auto",
    sharding: AttentionSharding | None = None,
    platform: str = "",
    chip: str = "",
    **options: Any,
) -> Float[Array, "B T H h"]:
    """Grouped-query softmax attention over packed rows. A token that sees nothing gives 0, and no gradient.

    Token i sees token j if and only if they share a segment other than 0 (padding) or kv_segments[j] is q_parents[i]
    (other than 0), q_positions[i], or q_reach[i] which is not less, >= kv_positions[j] (unless `causal` is False), and,
    with a window, q_positions[i] - kv_positions[j] < window. `options` are fields of AttentionRequest: scale, and
    perhaps window, softcap, causal, aligned, packed. Query head n reads key head n // (H // K). Scores are float32
    (float64 for float64 inputs); the result has q's dtype.

    `softcap` squashes scaled scores by tanh. With `slopes` the score of head n loses slopes[n] for each position from
    query back to key (ALiBi); they get no gradient. `sinks` are scores in every token's softmax that have no value.
    `aligned=True` promises that T == S and that no token sees one that comes after it in the row, `packed=False` that a
    row is one document followed by padding; `platform` and `chip` are those of AttentionRequest. With a `sharding` each
    device computes its own rows and heads, or its part of aligned rows, best stored in `zigzag_order`. `caches` are the
    arrays that k and v are a layer of: GPUs read one new token's past there (triton_decode).
    Raises: UserError for a backend that does not exist or cannot serve the request (see `choose_backend`).
    """
    B, T, H, h = q.shape
    S, K = k.shape[1:3]
    assert k.shape == v.shape == (B, S, K, h), f"keys {k.shape}, values {v.shape} for queries {q.shape}"
    assert H % K == 0, f"{H} heads are not a multiple of {K} key heads"
    platform = platform or (jax.default_backend() if sharding is None else sharding.platform)
    options |= {"platform": platform, "chip": chip or ("" if sharding is None else sharding.chip)}
    extras = {"alibi": slopes, "sinks": sinks, "parents": q_parents, "reaches": q_reach}
    options |= {name: array is not None for name, array in extras.items()}
    request = AttentionRequest(B, T, S, H, K, h, str(q.dtype), **options)
    assert not request.aligned or (T == S and request.causal), f"aligned rows of {T} queries and {S} keys"
    assert q_reach is None or not request.aligned, "rows whose tokens see later ones are not aligned"
    has_distances = request.window is not None or slopes is not None
    assert request.causal or not has_distances, "windows and biases are distances to earlier tokens"
    tokens = q_positions, kv_positions, q_segments, kv_segments
    inputs = AttentionInputs(q, k, v, *tokens, slopes, sinks, q_parents, q_reach)
    if sharding is not None and sharding.mesh.size > 1:
        return _attend_over_mesh(inputs, request, sharding, backend)
    if caches is not None and backend == "auto" and caches.k.dtype == q.dtype and decode_refusal(request) is None:
        return decode(inputs, request, caches)
    return choose_backend(request, backend)[0].run(inputs, request)


def _attend_over_mesh(
    inputs: AttentionInputs, request: AttentionRequest, sharding: AttentionSharding, backend: str
) -> Float[Array, "B T H h"]:
    sharding = sharding.fit(request)
    request = sharding.local(request)
    return run_over_mesh(choose_backend(request, backend)[0], inputs, request, sharding)
