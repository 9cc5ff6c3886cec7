"""Does a kernel compute here what it should? Compared once for each kind of device, on rows that try what it must do.

Kernels are compiled by drivers and compilers that no test of ours has seen. `direct`, which XLA makes from plain
products, is what they are compared with: values and gradients, packed and padded rows, and a window where there is one.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshtune.errors import UserError
from meshtune.kernels.attention.direct import DIRECT
from meshtune.kernels.attention.request import AttentionInputs, AttentionRequest, Backend

LENGTH = 400  # fills blocks of 128 and less, and breaks one
DOCUMENTS = ((150, 1, 149, 60), (LENGTH,))
WINDOW = 70  # reaches over blocks of 64
# The largest error, as a share of the largest value. Weights, their gradients and results are rounded to 8 bits in
# bfloat16 (2^-9 each, more where several add up); a wrong mask or block is wrong by the values themselves.
ALLOWED = {"bfloat16": 2**-5, "float16": 2**-7, "float32": 2**-11}


@dataclasses.dataclass(frozen=True)
class Checked:
    """`error` is the largest, as a share of the largest value; `known` says that an earlier check is relied on."""

    backend: str
    device: str
    error: float
    known: bool = False

    def __str__(self) -> str:
        how = "as checked before" if self.known else "checked now"
        return f"{self.backend} agrees with direct on {self.device} to {self.error:.1e} ({how})"


def self_check(request: AttentionRequest, backend: Backend, folder: pathlib.Path) -> Checked | None:
    """Compares `backend` with direct attention for what `request` asks, once for each kind of device and version.

    What was found lies in `folder`. None for backends that are XLA's own products. Raises UserError where they differ.
    """
    if backend.name in ("direct", "blockwise"):
        return None
    device = jax.local_devices()[0]
    small = small_request(request)
    facts = {"backend": backend.name, "request": dataclasses.asdict(small), **_versions(device)}
    path = folder / (hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24] + ".json")
    if path.is_file():
        return Checked(backend.name, device.device_kind, json.loads(path.read_text(encoding="utf-8"))["error"], True)
    error = largest_error(small, backend)
    if not error <= ALLOWED[small.dtype]:  # NaN is not, either
        raise UserError(
            f"attention backend '{backend.name}' computes wrong numbers on this {device.device_kind}: "
            f"off by {error:.1e} of the largest value, where {ALLOWED[small.dtype]:.1e} is rounding",
            where="compute.attention",
            fix="set compute.attention=blockwise, and report the chip, driver and JAX version (meshtune doctor)",
        )
    folder.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{jax.process_index()}")
    scratch.write_text(json.dumps(facts | {"error": error}, indent=1), encoding="utf-8")
    scratch.replace(path)
    return Checked(backend.name, device.device_kind, error)


def small_request(request: AttentionRequest) -> AttentionRequest:
    """The same question in small: two rows, two key heads at most, all that changes a kernel kept."""
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
    """Of the output and the gradients of q, k and v, as a share of each one's largest value. NaN for NaN."""
    arrays = [jnp.asarray(x) for x in _arrays(request)]

    @functools.partial(jax.jit, static_argnums=0)
    def both(exact: bool, q, k, v, g, positions, segments) -> Any:
        asked = dataclasses.replace(request, dtype="float32") if exact else request
        chosen = DIRECT if exact else backend
        tokens = positions, positions, segments, segments
        q, k, v, g = (x.astype(asked.dtype) for x in (q, k, v, g))
        out, pull = jax.vjp(lambda q, k, v: chosen.run(AttentionInputs(q, k, v, *tokens), asked), q, k, v)
        return [x.astype(jnp.float32) for x in (out, *pull(g))]

    worst = 0.0
    for mine, exact in zip(both(False, *arrays), both(True, *arrays), strict=True):
        mine, exact = np.asarray(mine), np.asarray(exact)
        error = float(np.abs(mine - exact).max() / np.abs(exact).max())
        worst = error if np.isnan(error) else max(worst, error)
        if np.isnan(worst):
            break
    return worst


def _arrays(request: AttentionRequest) -> list[np.ndarray]:
    """q, k, v and the output's gradient, rounded to the dtype in question; positions and segments."""
    random = np.random.default_rng(0)
    heads = (request.heads, request.kv_heads, request.kv_heads, request.heads)
    shapes = [(request.batch, LENGTH, n, request.head_dim) for n in heads]
    positions, segments = np.zeros((2, request.batch, LENGTH), np.int32)
    for row, lengths in enumerate(DOCUMENTS):
        # Of rows of one document the first is padded, too.
        lengths, start = lengths if request.packed else (sum(lengths),), 0
        for number, length in enumerate(lengths, start=1):
            segments[row, start : start + length] = number
            positions[row, start : start + length] = np.arange(length)
            start += length
    return [*(random.normal(size=shape).astype(jnp.dtype(request.dtype)) for shape in shapes), positions, segments]


@functools.cache
def _code() -> str:
    """The kernels' own text: a changed kernel is checked again."""
    files = sorted(pathlib.Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def _versions(device: Any) -> dict[str, str]:
    """What may change a kernel's numbers: the chip, the driver and compiler behind JAX, JAX, and the kernels."""
    return {"device": device.device_kind, "platform": device.client.platform_version, "jax": jax.__version__} | {
        "code": _code()
    }
