"""Compares a kernel with direct attention before its first use on each kind of device.

Kernels are compiled by drivers and compilers that our tests have never run. `direct`, which XLA compiles from ordinary
matmuls, is the reference for values and gradients, on packed and padded rows, with a window if the request has one, and
with documents that continue the first one of their row if the request has such.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from meshtune.errors import UserError
from meshtune.kernels.attention.backend import AttentionInputs, AttentionRequest, Backend
from meshtune.kernels.attention.direct import DIRECT

LENGTH = 400  # fills blocks of up to 128 tokens and leaves a partial one
DOCUMENTS = ((150, 1, 149, 60), (LENGTH,))
WINDOW = 70  # crosses blocks of 64
# The largest error relative to the largest value. In bfloat16 weights, their gradients and results are rounded to 8
# bits (2^-9 each, and more when several add up); a wrong mask or block is wrong by the values themselves.
ALLOWED = {"bfloat16": 2**-5, "float16": 2**-7, "float32": 2**-11}


@dataclasses.dataclass(frozen=True)
class SelfCheck:
    """A passed check. `error` is the largest, relative to the largest value; `cached` says that it is from an earlier
    run."""

    backend: str
    device: str
    error: float
    cached: bool = False

    def __str__(self) -> str:
        when = "as checked before" if self.cached else "checked now"
        return f"{self.backend} agrees with direct on {self.device} to {self.error:.1e} ({when})"


def self_check(request: AttentionRequest, backend: Backend, folder: pathlib.Path) -> SelfCheck | None:
    """Compares `backend` with direct attention for `request`, once for each kind of device and software version.

    Results are cached in `folder`. None for backends that XLA compiles from ordinary matmuls.
    Raises: UserError if the error exceeds ALLOWED.
    """
    if backend.name in ("direct", "blockwise"):
        return None
    device = jax.local_devices()[0]
    small = small_request(request)
    facts = {"backend": backend.name, "request": dataclasses.asdict(small), **_versions(device)}
    path = folder / (hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24] + ".json")
    if path.is_file():
        return SelfCheck(backend.name, device.device_kind, json.loads(path.read_text(encoding="utf-8"))["error"], True)
    error = largest_error(small, backend)
    if not error <= ALLOWED[small.dtype]:  # NaN fails, too
        raise UserError(
            f"attention backend '{backend.name}' computes wrong numbers on this {device.device_kind}: "
            f"the error is {error:.1e} of the largest value, and rounding explains {ALLOWED[small.dtype]:.1e}",
            where="compute.attention",
            fix="set compute.attention=blockwise, and report the chip, driver and JAX version (meshtune doctor)",
        )
    folder.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{jax.process_index()}")
    scratch.write_text(json.dumps(facts | {"error": error}, indent=1), encoding="utf-8")
    scratch.replace(path)
    return SelfCheck(backend.name, device.device_kind, error)


def small_request(request: AttentionRequest) -> AttentionRequest:
    """A smaller request that runs the same kernel: two rows and at most two key heads."""
    kv_heads = min(2, request.kv_heads)
    return dataclasses.replace(
        request,
        batch=len(DOCUMENTS),
        q_length=LENGTH,
        kv_length=LENGTH,
        heads=kv_heads * (request.heads // request.kv_heads),
        kv_heads=kv_heads,
        window=None if request.window is None else min(request.window, WINDOW),
        aligned=True,
        ring=1,
    )


def largest_error(request: AttentionRequest, backend: Backend) -> float:
    """Of the output and the gradients of q, k and v, relative to each one's largest value. NaN if any value is NaN."""
    arrays = [jnp.asarray(x) for x in _arrays(request)]
    reference_request = dataclasses.replace(request, dtype="float32")

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def forward_and_backward(backend: Backend, request: AttentionRequest, q, k, v, d_out, positions, segments):
        sinks = jnp.linspace(-1.0, 1.0, request.heads) if request.sinks else None
        parents = jnp.where(segments > 1, 1, 0) if request.parents else None
        tokens = positions, positions, segments, segments, None, sinks, parents
        q, k, v, d_out = (x.astype(request.dtype) for x in (q, k, v, d_out))
        out, vjp = jax.vjp(lambda q, k, v: backend.run(AttentionInputs(q, k, v, *tokens), request), q, k, v)
        return [x.astype(jnp.float32) for x in (out, *vjp(d_out))]

    actual = forward_and_backward(backend, request, *arrays)
    expected = forward_and_backward(DIRECT, reference_request, *arrays)
    worst = 0.0
    for x, reference in zip(actual, expected, strict=True):
        x, reference = np.asarray(x), np.asarray(reference)
        error = float(np.abs(x - reference).max() / np.abs(reference).max())
        worst = error if np.isnan(error) else max(worst, error)
        if np.isnan(worst):
            break
    return worst


def _arrays(request: AttentionRequest) -> list[np.ndarray]:
    """q, k, v and the output's gradient, rounded to the request's dtype; positions and segments."""
    random = np.random.default_rng(0)
    heads = (request.heads, request.kv_heads, request.kv_heads, request.heads)
    shapes = [(request.batch, LENGTH, n, request.head_dim) for n in heads]
    positions, segments = np.zeros((2, request.batch, LENGTH), np.int32)
    for row, lengths in enumerate(DOCUMENTS):
        # Without packing, the first row is a single document with padding.
        lengths, start = lengths if request.packed else (sum(lengths),), 0
        for segment, length in enumerate(lengths, start=1):
            segments[row, start : start + length] = segment
            continued = lengths[0] if request.parents and segment > 1 else 0
            positions[row, start : start + length] = continued + np.arange(length)
            start += length
    return [*(random.normal(size=shape).astype(jnp.dtype(request.dtype)) for shape in shapes), positions, segments]


@functools.cache
def _source_digest() -> str:
    """A digest of the kernels' source: a changed kernel is checked again."""
    files = sorted(pathlib.Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def _versions(device: jax.Device) -> dict[str, str]:
    """Everything that may change a kernel's numbers: the chip, the driver and compiler behind JAX, JAX, our source."""
    return {
        "device": device.device_kind,
        "platform": device.client.platform_version,
        "jax": jax.__version__,
        "source": _source_digest(),
    }
