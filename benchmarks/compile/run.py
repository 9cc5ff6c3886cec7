"""Seconds to trace and compile the training step of a 405B-wide Llama against its number of layers.

python benchmarks/compile/run.py [--rounds 2] > benchmarks/compile/result.json
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import statistics
import sys
import time

LAYERS = (2, 8, 32, 126)
CASE = "405B LoRA, fsdp=8"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    rounds = parser.parse_args().rounds
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tests/mesh"))

    import jax
    from lowering_cases import CASES, lowered

    found: dict[int, list[tuple[float, float]]] = {layers: [] for layers in LAYERS}
    for _ in range(rounds):
        for layers in LAYERS:
            jax.clear_caches()
            began = time.perf_counter()
            program, _sizes = lowered(CASES[CASE], layers)
            traced = time.perf_counter()
            program.compile()
            found[layers].append((traced - began, time.perf_counter() - traced))
            print(layers, found[layers][-1], file=sys.stderr, flush=True)
    medians = {
        layers: {
            "trace_seconds": statistics.median(t for t, _ in runs),
            "compile_seconds": statistics.median(c for _, c in runs),
        }
        for layers, runs in found.items()
    }
    print(
        json.dumps(
            {"case": CASE, "jax": jax.__version__, "machine": platform.machine(), "rounds": rounds, "layers": medians},
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
