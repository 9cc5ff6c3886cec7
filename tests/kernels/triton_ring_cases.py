"""The Triton kernels over meshes of 8 simulated devices, interpreted, in a separate process.

python triton_ring_cases.py RESULTS.npz     writes for each case the output and the gradients of q, k and v
"""

from __future__ import annotations

import functools
import sys

import numpy as np

from kernels.mesh_attention_cases import PACKED, Case, output_and_gradients

FORCED = {"backend": "triton", "dtype": "float32"}
CASES = {
    "packed in zig-zag order, cp=4": Case({"cp": 4}, [[70, 1, 40, 10], [128]], 128, **FORCED),
    "sharded rows, heads and tokens": Case({"dp": 2, "cp": 2, "tp": 2}, PACKED[:2], 256, window=90, **FORCED),
    "padding, soft cap, fewer key heads than tp": Case(
        {"cp": 2, "tp": 4}, [[41, 3], []], 64, H=8, K=2, softcap=1.5, **FORCED
    ),
    "sinks in a ring": Case({"cp": 2, "tp": 2}, [[41, 3], []], 64, sinks=True, **FORCED),
    "one prompt in a ring": Case({"cp": 2}, [[41, 3, 15], [20, 30]], 64, continued=True, **FORCED),
    "no ring, replicated key heads": Case({"dp": 2, "tp": 2}, [[60], [20, 30]], 64, H=6, K=3, **FORCED),
}


def main() -> None:
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    from meshtune.kernels.attention import BACKENDS, Backend, triton, triton_kernels, triton_ring
    from meshtune.kernels.attention.triton_kernels import Tile, Tiles

    tile = Tile(16, 16, 4, 1)
    triton_kernels.tiles_of = lambda request: Tiles(tile, tile, tile)
    run, run_sharded = (functools.partial(f, interpret=True) for f in (triton.run, triton_ring.run))
    BACKENDS[BACKENDS.index(triton.TRITON)] = Backend("triton", run, run_sharded=run_sharded)
    results = {f"{name}/{n}": x for name, case in CASES.items() for n, x in enumerate(output_and_gradients(case))}
    np.savez(sys.argv[1], **results)


if __name__ == "__main__":
    main()
