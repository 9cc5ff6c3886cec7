"""Attention behind one function: what is asked is described once, and the first backend that serves it computes it."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int

from meshtune.errors import UserError, nearest
from meshtune.kernels.attention.balance import balanced_order
from meshtune.kernels.attention.blockwise import BLOCKWISE
from meshtune.kernels.attention.cudnn import CUDNN
from meshtune.kernels.attention.direct import DIRECT
from meshtune.kernels.attention.products import LOG_SUM_EXP, OUTPUT
from meshtune.kernels.attention.request import AttentionInputs, AttentionRequest, Backend
from meshtune.kernels.attention.splash import SPLASH
from meshtune.kernels.attention.split import AttentionSplit, run_over_mesh
from meshtune.kernels.attention.triton import TRITON

__all__ = [
    "BACKENDS",
    "LOG_SUM_EXP",
    "OUTPUT",
    "AttentionInputs",
    "AttentionRequest",
    "AttentionSplit",
    "Backend",
    "attention",
    "balanced_order",
    "choose",
]

# In order of preference for backend="auto". A new backend is one file and one line here.
BACKENDS: list[Backend] = [
    DIRECT,
    SPLASH,
    CUDNN,
    TRITON,
    BLOCKWISE,
]


def choose(request: AttentionRequest, backend: str = "auto") -> tuple[Backend, str]:
    """The backend that serves `request`, and why it was taken (for the run's banner).

    Raises UserError if a forced backend is unknown or cannot serve, or if none can, with every backend's reason.
    """
    if backend != "auto":
        by_name = {entry.name: entry for entry in BACKENDS}
        if backend not in by_name:
            raise UserError(
                f"attention backend '{backend}' does not exist",
                fix=f"{nearest(backend, by_name)}choose one of auto, {', '.join(by_name)}",
            )
        refusal = by_name[backend].refusal(request)
        if refusal is None:
            return by_name[backend], "asked for"
        serving = [entry.name for entry in BACKENDS if entry.refusal(request) is None]
        raise UserError(
            f"attention backend '{backend}' cannot serve this model or batch: {_reasons(request)}",
            fix=f"choose auto{''.join(', ' + name for name in serving)}",
        )
    passed_over = []
    for entry in BACKENDS:
        refusal = entry.refusal(request) or entry.suits(request)
        if refusal is None:
            return entry, "; ".join(passed_over) or "first choice"
        passed_over.append(f"not {entry.name}: {refusal}")
    raise UserError(f"no attention backend can serve this model or batch: {'; '.join(passed_over)}")


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
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    backend: str = "auto",
    aligned: bool = False,
    split: AttentionSplit | None = None,
    platform: str = "",
    chip: str = "",
    packed: bool = True,
    slopes: Float[Array, "H"] | None = None,
) -> Float[Array, "B T H h"]:
    """Grouped-query softmax attention over packed rows.

    Token i sees token j if and only if they share a segment other than 0 (padding), q_positions[i] >= kv_positions[j],
    and, with a window, q_positions[i] - kv_positions[j] < window. Query head n reads key head n // (H // K), and keys
    and values are never repeated. A token that sees nothing gives 0 and takes part in no gradient.

    Scores are float32 (float64 for float64 inputs); the result has q's dtype. `softcap` squashes scaled scores by tanh.
    `aligned=True` promises T == S and that within a row no token sees one that stands after it. With a `split` each
    device of its mesh computes its own rows and heads, and aligned rows may be split too: keys and values then go
    round a ring of devices, and rows should be held in `balanced_order` ("stands after" means in the row's own order).
    The result is the same; what an axis does not divide is whole on each of its devices.
    `platform` and `chip` say what the program is compiled for, where that is not the first device here (see chips).
    `packed=False` promises that a row is one document and then padding. With `slopes` the scaled score of head n loses
    slopes[n] for every position from query back to key (ALiBi, arXiv:2108.12409); no gradient goes to them.
    Raises UserError for a backend that does not exist or cannot serve (see `choose`).
    """
    B, T, H, h = q.shape
    S, K = k.shape[1:3]
    assert k.shape == v.shape == (B, S, K, h), f"keys {k.shape}, values {v.shape} for queries {q.shape}"
    assert H % K == 0, f"{H} heads are no multiple of {K} key heads"
    assert not aligned or T == S, f"aligned rows of {T} queries and {S} keys"
    request = AttentionRequest(
        batch=B,
        q_length=T,
        kv_length=S,
        heads=H,
        kv_heads=K,
        head_dim=h,
        dtype=str(q.dtype),
        platform=platform or (jax.default_backend() if split is None else split.platform),
        scale=scale,
        window=window,
        softcap=softcap,
        aligned=aligned,
        chip=chip or ("" if split is None else split.chip),
        packed=packed,
        alibi=slopes is not None,
    )
    inputs = AttentionInputs(q, k, v, q_positions, kv_positions, q_segments, kv_segments, slopes)
    if split is None or split.mesh.size == 1:
        return choose(request, backend)[0].run(inputs, request)
    split = split.fitted(request)
    request = split.local(request)
    return run_over_mesh(choose(request, backend)[0], inputs, request, split)
