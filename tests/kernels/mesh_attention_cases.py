"""Attention over meshes of 8 simulated devices: the cases, and the program that computes them in a separate process.

python mesh_attention_cases.py RESULTS.npz CASE ...     writes the output and the gradients of q, k and v for each
"""

from __future__ import annotations

import dataclasses
import sys

import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    mesh: dict[str, int]
    lengths: list[list[int]]
    T: int
    H: int = 4
    K: int = 2
    kv_replicated: bool = False
    zigzag: bool = True
    backend: str = "auto"
    dtype: str = "float64"
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    continued: bool = False  # whether all documents of a row continue its first one
    new: int | None = None  # if given, only these last tokens are queries, with a cache of T

    def arrays(self):
        """q, k, v, the output's cotangent, then segments and positions of the row."""
        B, T, h, random = len(self.lengths), self.T, 8, np.random.default_rng(0)
        q, k, v, g = (random.normal(size=(B, T, n, h)).astype(self.dtype) for n in (self.H, self.K, self.K, self.H))
        segments, positions = np.zeros((B, T), np.int32), np.zeros((B, T), np.int32)
        for row, lengths in enumerate(self.lengths):
            ends = np.cumsum(lengths)
            for n, (end, length) in enumerate(zip(ends, lengths, strict=True)):
                segments[row, end - length : end] = n + 1
                continued = lengths[0] if self.continued and n else 0
                positions[row, end - length : end] = continued + np.arange(length)
        start = 0 if self.new is None else T - self.new
        return q[:, start:], k, v, g[:, start:], segments, positions, start

    def tokens(self, segments, positions, start):
        return {
            "q_positions": positions[:, start:],
            "kv_positions": positions,
            "q_segments": segments[:, start:],
            "kv_segments": segments,
            **({"q_parents": (segments[:, start:] > 1).astype(np.int32)} if self.continued else {}),
        }

    @property
    def options(self):
        sinks = {"sinks": np.linspace(-1.5, 2.0, self.H).astype(self.dtype)} if self.sinks else {}
        return {"scale": 0.4, "window": self.window, "softcap": self.softcap, **sinks}


PACKED = [[70, 1, 90, 60], [200, 56], [30] * 8, [256]]
CASES = {
    "one document, cp=4": Case({"cp": 4}, [[256], [200]], 256),
    "contiguous shards": Case({"cp": 4}, [[256], [200]], 256, zigzag=False),
    "packed": Case({"fsdp": 4, "cp": 2}, PACKED, 256),
    "packed over dp, cp and tp": Case({"dp": 2, "cp": 2, "tp": 2}, PACKED, 256),
    "many segments": Case({"cp": 8}, [[3] * 50, [7] * 22], 160),
    "padding, and a row of padding only": Case({"cp": 4}, [[20], [41, 3], []], 64),
    "window": Case({"cp": 8}, [[256], [100, 150]], 256, window=40),
    "softcap": Case({"cp": 4}, [[100, 28]], 128, softcap=1.5),
    "sinks over dp, cp and tp": Case({"dp": 2, "cp": 2, "tp": 2}, PACKED, 256, window=40, sinks=True),
    "one prompt over dp, cp and tp": Case({"dp": 2, "cp": 2, "tp": 2}, PACKED, 256, window=90, continued=True),
    "one prompt, direct": Case({"dp": 2, "tp": 2}, [[20, 9, 30], []], 64, continued=True, backend="direct"),
    "sinks, no ring": Case({"dp": 2, "tp": 4}, PACKED, 256, H=8, K=2, sinks=True, backend="blockwise"),
    "sinks, direct": Case({"dp": 2, "tp": 2}, [[60], []], 64, sinks=True, backend="direct"),
    "window and softcap": Case({"cp": 4, "tp": 2}, PACKED, 256, window=19, softcap=2.0),
    "chunks that are not multiples of blocks": Case({"cp": 2}, [[104], [50, 40]], 104),
    "two tokens per device": Case({"cp": 8}, [[16], [9, 7]], 16),
    "fewer key heads than tp": Case({"cp": 2, "tp": 4}, PACKED, 256, H=8, K=2),
    "replicated key heads that tp divides": Case({"cp": 2, "tp": 2}, [[64]], 64, H=8, K=4, kv_replicated=True),
    "groups that tp cuts": Case({"cp": 2, "tp": 2}, [[60]], 64, H=6, K=3),
    "groups that tp cuts, direct": Case({"dp": 2, "tp": 2}, [[60], [30]], 64, H=6, K=3, backend="direct"),
    "fewer key heads than tp, direct": Case({"dp": 2, "tp": 4}, [[60], [30]], 64, H=8, K=2, backend="direct"),
    "fewer key heads than tp, no ring": Case({"dp": 2, "tp": 4}, PACKED, 256, H=8, K=2, backend="blockwise"),
    "heads that tp does not divide": Case({"dp": 2, "tp": 4}, [[60], [30]], 64, H=6, K=3, backend="blockwise"),
    "rows that dp does not divide": Case({"dp": 2, "tp": 2}, [[60], [30], [64]], 64, backend="blockwise"),
    "rows that dp does not divide, direct": Case({"dp": 2, "tp": 2}, [[60], [30], [64]], 64, backend="direct"),
    "a length that cp does not divide": Case({"cp": 4}, [[37], [30]], 37, zigzag=False, backend="direct"),
    "one new token": Case({"dp": 2, "cp": 2, "tp": 2}, [[57], [40, 17]], 57, new=1),
    "one new token, fewer key heads than tp": Case({"dp": 2, "tp": 4}, [[57], [40, 17]], 57, H=8, new=1),
    "new tokens in blocks": Case({"cp": 2, "tp": 4}, [[64], [40, 24]], 64, H=8, new=32, backend="blockwise"),
    "float32": Case({"cp": 4, "tp": 2}, PACKED, 256, dtype="float32"),
}


def mesh_of(sizes: dict[str, int]):
    import jax

    names = ("dp", "fsdp", "cp", "ep", "tp")
    shape = tuple(sizes.get(name, 1) for name in names)
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names), devices=devices)


def sharding_of(sizes: dict[str, int], H: int, K: int, kv_replicated: bool = False):
    from meshtune.kernels.attention import AttentionSharding

    tp = sizes.get("tp", 1)
    return AttentionSharding(mesh_of(sizes), ("dp", "fsdp"), "tp", None if kv_replicated or K % tp else "tp", "cp")


def output_and_gradients(case: Case):
    """The output and the gradients of q, k and v, in the original order of the tokens, and of sinks, if any."""
    import jax

    from meshtune.kernels.attention import attention, zigzag_order

    q, k, v, g, segments, positions, start = case.arrays()
    order = zigzag_order(case.T, case.mesh.get("cp", 1)) if case.zigzag and case.new is None else np.arange(case.T)
    sharding = sharding_of(case.mesh, case.H, case.K, case.kv_replicated)

    # Compiles in half the time; tests of the compiled programs use the compiler's default optimisation.
    @jax.jit(compiler_options={"xla_backend_optimization_level": 0})
    def forward_and_backward(q, k, v, g, segments, positions):
        def attend(q, k, v, sinks):
            tokens = case.tokens(segments, positions, start)
            options = case.options | {"sinks": sinks, "backend": case.backend, "aligned": case.new is None}
            return attention(q, k, v, **tokens, **options, sharding=sharding)

        out, vjp = jax.vjp(attend, q, k, v, case.options.get("sinks"))
        return out, *vjp(g)

    if case.new is None:
        arrays = [x[:, order] for x in (q, k, v, g, segments, positions)]
        results = [np.asarray(x) for x in forward_and_backward(*arrays) if x is not None]
        return [x[:, np.argsort(order)] if x.ndim == 4 else x for x in results]
    return [np.asarray(x) for x in forward_and_backward(q, k, v, g, segments, positions) if x is not None]


def main() -> None:
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_x64", True)
    from meshtune.kernels.attention import blocks

    # Small blocks of two different sizes, so that small rows have many, both full and partial.
    blocks.block_sizes = lambda request: (min(8, request.q_length), min(12, request.kv_length))
    file, *names = sys.argv[1:]
    results = {f"{name}/{n}": x for name in names for n, x in enumerate(output_and_gradients(CASES[name]))}
    np.savez(file, **results)


if __name__ == "__main__":
    main()
