"""Attention and cross-entropy on CPU at SmolLM2-135M's shapes, beside torch: alternated, forward and backward.

Run from the repository's root:  OMP_WAIT_POLICY=passive python benchmarks/cpu_kernels/bench.py

Each line gives, for each competitor, the median wall-clock milliseconds and the least CPU milliseconds (of all threads)
of one call. CPU time is what other work on the machine disturbs least; waiting threads of torch do not spin
(OMP_WAIT_POLICY), so that it counts work alone.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch

from meshtune.kernels.attention import attention
from meshtune.kernels.cross_entropy import cross_entropy

H, K, h = 9, 3, 64
V, D = 49152, 576


def race(runs: dict[str, Callable[[], object]], rounds: int) -> str:
    """Medians and minima after two rounds of warm-up, one call of each in turn."""
    wall, cpu = {name: [] for name in runs}, {name: [] for name in runs}
    for number in range(rounds + 2):
        for name, run in runs.items():
            wall_start, cpu_start = time.perf_counter(), time.process_time()
            run()
            if number > 1:
                wall[name].append(time.perf_counter() - wall_start)
                cpu[name].append(time.process_time() - cpu_start)
    return "  ".join(f"{name} {1e3 * np.median(wall[name]):.1f}/{1e3 * min(cpu[name]):.1f}" for name in runs)


def packed(random: np.random.Generator, B: int, T: int, median: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Segments and positions: one document a row, or documents of log-normal length with this median."""
    segments = np.ones((B, T), np.int32)
    positions = np.tile(np.arange(T, dtype=np.int32), (B, 1))
    for row in range(B if median else 0):
        start, n = 0, 1
        while start < T:
            length = min(T - start, max(8, int(random.lognormal(np.log(median), 0.6))))
            segments[row, start : start + length] = n
            positions[row, start : start + length] = np.arange(length)
            start, n = start + length, n + 1
    return segments, positions


def attention_runs(B: int, T: int, median: int | None, backends: list[str]) -> dict[str, Callable[[], object]]:
    """Output and gradients of q, k, v. Torch gets its own layout, and is_causal where that says all."""
    random = np.random.default_rng(0)
    q, k, v, g = (random.normal(size=(B, T, n, h)).astype(np.float32) for n in (H, K, K, H))
    segments, positions = packed(random, B, T, median)
    runs: dict[str, Callable[[], object]] = {}
    for backend in backends:

        @jax.jit
        def both(q, k, v, g, segments, positions, backend=backend):
            def run(q, k, v):
                return attention(
                    q, k, v, q_positions=positions, kv_positions=positions, q_segments=segments, kv_segments=segments,
                    scale=h**-0.5, backend=backend, aligned=True,
                )  # fmt: skip

            out, pull = jax.vjp(run, q, k, v)
            return out, pull(g)

        arrays = [jnp.asarray(x) for x in (q, k, v, g, segments, positions)]
        runs[backend] = lambda both=both, arrays=arrays: jax.block_until_ready(both(*arrays))
    turned = [torch.tensor(x).transpose(1, 2).contiguous() for x in (q, k, v, g)]
    inputs = [x.requires_grad_() for x in turned[:3]]
    same = torch.tensor(segments[:, :, None] == segments[:, None, :]).tril()[:, None]
    options = {"attn_mask": same} if median else {"is_causal": True}

    def torch_both():
        for x in inputs:
            x.grad = None
        out = torch.nn.functional.scaled_dot_product_attention(*inputs, **options, enable_gqa=True)
        out.backward(turned[3])

    return runs | {"torch": torch_both}


def decode_runs(B: int, S: int) -> dict[str, Callable[[], object]]:
    """One new token against a cache of S, forward alone, ten times."""
    random = np.random.default_rng(0)
    q, k, v = (jnp.asarray(random.normal(size=(B, n, m, h)), jnp.float32) for n, m in ((1, H), (S, K), (S, K)))
    rows = jnp.ones((B, S), jnp.int32), jnp.tile(jnp.arange(S), (B, 1))
    runs: dict[str, Callable[[], object]] = {}
    for backend in ("direct", "blockwise"):

        @jax.jit
        def forward(q, k, v, segments, positions, backend=backend):
            return attention(
                q, k, v, q_positions=positions[:, -1:], kv_positions=positions, q_segments=segments[:, -1:],
                kv_segments=segments, scale=h**-0.5, backend=backend,
            )  # fmt: skip

        runs[backend] = lambda forward=forward: [jax.block_until_ready(forward(q, k, v, *rows)) for _ in range(10)]
    return runs


def cross_entropy_runs(B: int, T: int, supervised: float, chunks: list[int]) -> dict[str, Callable[[], object]]:
    """Gradient of hidden with a frozen head; chunks are in tokens of the batch."""
    random = np.random.default_rng(0)
    weight = random.normal(size=(V, D)).astype(np.float32) * 0.05
    hidden = random.normal(size=(B, T, D)).astype(np.float32)
    targets = random.integers(0, V, (B, T)).astype(np.int32)
    weights = (random.random((B, T)) < supervised).astype(np.float32)

    def head(weight, x):
        return jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))

    arrays = [jnp.asarray(x) for x in (hidden, weight, targets, weights)]
    runs: dict[str, Callable[[], object]] = {}

    def unchunked(head, weight, hidden, targets, weights, chunk):
        log_probs = jax.nn.log_softmax(head(weight, hidden))
        return (-jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0] * weights).sum(), None

    for chunk in [*chunks, None]:
        function = unchunked if chunk is None else cross_entropy

        @jax.jit
        def gradient(hidden, weight, targets, weights, function=function, chunk=chunk):
            row_chunk = T if chunk is None else chunk // B
            return jax.grad(lambda x: function(head, weight, x, targets, weights, chunk=row_chunk)[0])(hidden)

        name = "plain" if chunk is None else f"chunk-{chunk}"
        runs[name] = lambda gradient=gradient: jax.block_until_ready(gradient(*arrays))
    torch_hidden, torch_weight = torch.tensor(hidden).requires_grad_(), torch.tensor(weight)
    torch_targets = torch.tensor(np.where(weights > 0, targets, -100)).long().flatten()

    def torch_gradient():
        torch_hidden.grad = None
        logits = torch.nn.functional.linear(torch_hidden, torch_weight).view(-1, V)
        torch.nn.functional.cross_entropy(logits, torch_targets, reduction="sum").backward()

    return runs | {"torch": torch_gradient}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(2)
    print(f"python {platform.python_version()}, jax {jax.__version__}, torch {torch.__version__}; wall/CPU ms")
    both = ["direct", "blockwise"]
    for B, T in ((64, 32), (32, 64), (16, 128), (8, 256), (4, 512), (2, 1024), (1, 2048), (1, 4096)):
        for median in (None, 150) if T >= 256 else (None,):
            kind = f"packed {median}" if median else "one document"
            backends = both if T <= 1024 else ["blockwise"]
            print(f"attention {B} x {T}, {kind}: {race(attention_runs(B, T, median, backends), rounds)}", flush=True)
    for B, S in ((1, 512), (1, 2048), (8, 2048)):
        print(f"decode {B} x 1 of {S}: {race(decode_runs(B, S), rounds)}", flush=True)
    for B, T, supervised, chunks in (
        (1, 512, 1.0, [64, 128, 256, 512]),
        (4, 256, 1.0, [128, 256]),
        (4, 256, 0.4, [128, 256]),
    ):
        runs = cross_entropy_runs(B, T, supervised, chunks)
        print(f"cross-entropy {B} x {T}, {supervised:.0%} supervised: {race(runs, max(3, rounds // 3))}", flush=True)


if __name__ == "__main__":
    main()
