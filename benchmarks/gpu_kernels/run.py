"""Attention on the GPU that is here: are the numbers right, and how long does each backend take?

Run from the repository's root:  python benchmarks/gpu_kernels/run.py [--json results.json] [--tiny]

First every backend's output and gradients are compared with direct attention in float32. Then, alternating, each is
timed forward alone and forward with backward: the kernels written here, cuDNN (where a row is one document), and
blockwise attention. Model FLOPs of a causal row are those of half the square: 2 products forward, 5 backward.
`--tiles` times other block sizes for the kernels, too. `--tiny` runs it all on a CPU, kernels interpreted, in small.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshtune.kernels.attention import BACKENDS, AttentionInputs, AttentionRequest, Backend, triton, triton_kernels
from meshtune.kernels.attention.self_check import ALLOWED, largest_error, small_request
from meshtune.kernels.attention.triton_kernels import Tile
from meshtune.kernels.chips import arch_of

# name: rows, tokens, query heads, key heads, head dimension, documents of about this many tokens (None: one a row)
SHAPES: dict[str, tuple[int, int, int, int, int, int | None]] = {
    "8B 4x4096": (4, 4096, 32, 8, 128, None),
    "8B 4x4096 packed": (4, 4096, 32, 8, 128, 512),
    "8B 1x32768": (1, 32768, 32, 8, 128, None),
    "1B 8x4096, heads of 64": (8, 4096, 32, 8, 64, None),
    "9B 2x4096, heads of 256": (2, 4096, 16, 8, 256, None),
}
TINY: dict[str, tuple[int, int, int, int, int, int | None]] = {
    "tiny": (1, 256, 2, 1, 32, None),
    "tiny packed": (1, 256, 2, 1, 32, 60),
}
TILES = {
    "forward": [(128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 4, 2), (64, 64, 4, 2), (128, 32, 4, 2)],
    "dq": [(128, 64, 8, 2), (128, 32, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (128, 32, 4, 2)],
    "dkv": [(64, 128, 8, 2), (64, 64, 8, 2), (32, 64, 4, 2), (64, 64, 4, 2), (32, 128, 8, 2), (32, 32, 4, 2)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write everything measured here; -: as the last line of the output")
    parser.add_argument("--shape", help="this one alone")
    parser.add_argument("--tiny", action="store_true", help="small shapes on a CPU, kernels interpreted")
    parser.add_argument("--tiles", action="store_true", help="time other block sizes for the Triton kernels")
    parser.add_argument("--rounds", type=int, default=20)
    asked = parser.parse_args()
    device = jax.devices()[0]
    print(f"{device.device_kind} {arch_of(device)}, jax {jax.__version__}, {device.client.platform_version}")
    found: dict[str, Any] = {"device": device.device_kind, "jax": jax.__version__, "shapes": {}}
    for name, shape in (TINY if asked.tiny else SHAPES).items():
        if asked.shape not in (None, name):
            continue
        found["shapes"][name] = measured(name, shape, asked)
    if asked.json == "-":
        print(json.dumps(found))
    elif asked.json:
        with open(asked.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


def measured(name: str, shape: tuple[int, int, int, int, int, int | None], asked: argparse.Namespace) -> dict[str, Any]:
    B, T, H, K, h, document = shape
    request = AttentionRequest(
        batch=B, q_length=T, kv_length=T, heads=H, kv_heads=K, head_dim=h, dtype="bfloat16", scale=h**-0.5,
        aligned=True, packed=document is not None, platform="cuda" if asked.tiny else jax.default_backend(),
        chip="sm_90a" if asked.tiny else arch_of(jax.devices()[0]),
    )  # fmt: skip
    backends, refused = serving(request, asked.tiny)
    print(f"\n{name}: {B} x {T}, {H} heads of {h} on {K}; {'; '.join(refused)}")
    checks = {backend.name: largest_error(small_request(request), backend) for backend in backends}
    for backend, error in checks.items():
        verdict = "right" if error <= ALLOWED["bfloat16"] else "WRONG"
        print(f"  {backend:10} {verdict}: off by {error:.1e} of the largest value")
    arrays, pairs = inputs_of(shape)
    runs = {
        (backend.name, kind): program(backend, request, kind, arrays)
        for backend in backends
        for kind in ("forward", "both")
    }
    seconds = race(runs, 2 if asked.tiny else asked.rounds)
    rows = {}
    for (backend, kind), spent in seconds.items():
        flops = (4 if kind == "forward" else 14) * pairs * H * h  # multiply and add: 2 a pair, element and product
        rows[f"{backend} {kind}"] = {"ms": 1e3 * spent, "tflops": flops / spent / 1e12}
        print(f"  {backend:10} {kind:8} {1e3 * spent:9.3f} ms  {flops / spent / 1e12:7.1f} TFLOP/s")
    answer = {"errors": checks, "times": rows, "refused": refused}
    if asked.tiles and any(backend.name == "triton" for backend in backends):
        answer["tiles"] = swept(request, arrays, asked.rounds)
    return answer


def serving(request: AttentionRequest, tiny: bool) -> tuple[list[Backend], list[str]]:
    """The backends that serve, and what the others say."""
    backends, refused = [], []
    for backend in BACKENDS:
        reason = backend.refusal(request) or (backend.suits(request) if backend.name == "direct" else None)
        if reason is not None:
            refused.append(f"not {backend.name}: {reason}")
        elif backend.name == "triton" and tiny:
            backends.append(Backend("triton", interpreted))
        else:
            backends.append(backend)
    return backends, refused


def interpreted(inputs: AttentionInputs, request: AttentionRequest) -> jax.Array:
    return triton.run(inputs, request, interpret=True)


def inputs_of(shape: tuple[int, int, int, int, int, int | None]) -> tuple[list[jax.Array], int]:
    """q, k, v, the output's gradient, positions and segments; and the pairs of tokens that see each other."""
    B, T, H, K, h, document = shape
    random = np.random.default_rng(0)
    arrays = [random.normal(size=(B, T, n, h)).astype(np.float32) for n in (H, K, K, H)]
    positions, segments, pairs = np.zeros((B, T), np.int32), np.ones((B, T), np.int32), 0
    for row in range(B):
        start, number = 0, 1
        while start < T:
            length = T if document is None else min(T - start, max(8, int(random.lognormal(np.log(document), 0.6))))
            positions[row, start : start + length] = np.arange(length)
            segments[row, start : start + length] = number
            start, number, pairs = start + length, number + 1, pairs + length * (length + 1) // 2
    return [*(jnp.asarray(x, jnp.bfloat16) for x in arrays), jnp.asarray(positions), jnp.asarray(segments)], pairs


def program(backend: Backend, request: AttentionRequest, kind: str, arrays: list[jax.Array]) -> Callable[[], Any]:
    @jax.jit
    def run(q, k, v, g, positions, segments):
        def attend(q, k, v):
            return backend.run(AttentionInputs(q, k, v, positions, positions, segments, segments), request)

        if kind == "forward":
            return attend(q, k, v)
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(g)

    return lambda: jax.block_until_ready(run(*arrays))


def race(runs: dict[Any, Callable[[], Any]], rounds: int) -> dict[Any, float]:
    """The median seconds of each after two rounds of warm-up, one call of each in turn."""
    spent: dict[Any, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 2):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            if number > 1:
                spent[name].append(time.perf_counter() - began)
    return {name: float(np.median(times)) for name, times in spent.items()}


def swept(request: AttentionRequest, arrays: list[jax.Array], rounds: int) -> dict[str, float]:
    """Milliseconds by block sizes, one kernel's changed at a time; the shipped ones for the other two."""
    shipped, times, usual = triton_kernels.tiles_of(request), {}, triton_kernels.tiles_of
    for kernel, block in itertools.chain.from_iterable([(k, b) for b in blocks] for k, blocks in TILES.items()):
        tiles = dataclasses.replace(shipped, **{kernel: Tile(*block)})
        triton_kernels.tiles_of = lambda request, tiles=tiles: tiles
        try:
            run = program(triton.TRITON, request, "forward" if kernel == "forward" else "both", arrays)
            times[f"{kernel} {block}"] = 1e3 * race({0: run}, rounds)[0]
            print(f"  {kernel:8} {block!s:20} {times[f'{kernel} {block}']:9.3f} ms")
        except jax.errors.JaxRuntimeError as error:
            print(f"  {kernel:8} {block!s:20} {str(error).splitlines()[0][:90]}")
        finally:
            triton_kernels.tiles_of = usual
    return times


if __name__ == "__main__":
    main()
