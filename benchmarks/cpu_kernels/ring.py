"""What a ring of simulated devices costs over one device: attention forward and backward, one long row.

Run from the repository's root:  python benchmarks/cpu_kernels/ring.py

All devices share this machine's cores, so the total of CPU milliseconds is what the ring adds, and wall-clock time says
nothing of a machine that has the devices. Programs run in turn; each line gives the least of the rounds.
"""

from __future__ import annotations

import argparse
import time

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshtune.kernels.attention import AttentionSharding, attention, zigzag_order

H, K, h = 9, 3, 64


def ring_run(T: int, parts: int, order: np.ndarray):
    random = np.random.default_rng(0)
    q, k, v, g = (random.normal(size=(1, T, n, h)).astype(np.float32) for n in (H, K, K, H))
    positions = np.arange(T, dtype=np.int32)[None]
    mesh = jax.make_mesh((parts,), ("cp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:parts])

    @jax.jit
    def both(q, k, v, g, positions, segments):
        def run(q, k, v):
            return attention(
                q, k, v, q_positions=positions, kv_positions=positions, q_segments=segments, kv_segments=segments,
                scale=h**-0.5, backend="blockwise", aligned=True, sharding=AttentionSharding(mesh, length="cp"),
            )  # fmt: skip

        out, pull = jax.vjp(run, q, k, v)
        return out, pull(g)

    held = NamedSharding(mesh, PartitionSpec(None, "cp"))
    arrays = [jax.device_put(x[:, order], held) for x in (q, k, v, g, positions, np.ones_like(positions))]
    return lambda: jax.block_until_ready(both(*arrays))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=4096)
    asked = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 4)
    T = asked.tokens
    runs = {f"{parts} devices, balanced": ring_run(T, parts, zigzag_order(T, parts)) for parts in (1, 2, 4)}
    runs["2 devices, own order"] = ring_run(T, 2, np.arange(T))
    least = dict.fromkeys(runs, (np.inf, np.inf))
    for number in range(asked.rounds + 2):
        for name, run in runs.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            took = time.perf_counter() - wall, time.process_time() - cpu
            if number > 1:
                least[name] = tuple(map(min, least[name], took))
    for name, (wall, cpu) in least.items():
        print(f"{name}: wall {1e3 * wall:.0f} ms, CPU {1e3 * cpu:.0f} ms")


if __name__ == "__main__":
    main()
