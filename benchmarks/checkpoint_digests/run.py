"""What digests cost a save and a restore: seconds of each and of the hashing within it.

    python benchmarks/checkpoint_digests/run.py [--megabytes 512] [--rounds 5] [--folder /tmp/checkpoint_digests]

The state is random float32 numbers, which do not compress. Seconds of a save are until it is on disk; training waits
for a small part of them, and for none of the hashing.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import statistics
import time
from unittest import mock

import jax.numpy as jnp
import numpy as np

from meshtune.train.checkpoint import state_handler
from meshtune.train.checkpoint.checkpoints import Checkpoints, Record
from meshtune.train.step.state import TrainState


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("/tmp/checkpoint_digests"))
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    count = 16
    leaf = (options.megabytes * 1_000_000 // 4 // count // 1024, 1024)
    weights = {f"w{n}": jnp.asarray(rng.normal(size=leaf), jnp.float32) for n in range(count)}
    seconds: dict[str, list[float]] = {"save": [], "hash at save": [], "restore": [], "hash at restore": []}
    hash_files = state_handler.digest_files

    def timed(*arguments: object) -> object:
        start = time.perf_counter()
        result = hash_files(*arguments)
        hashing.append(time.perf_counter() - start)
        return result

    for number in range(options.rounds):
        shutil.rmtree(options.folder, ignore_errors=True)
        state = TrainState(jnp.int32(number), weights, ())
        hashing: list[float] = []
        with (
            mock.patch.object(state_handler, "digest_files", timed),
            Checkpoints(options.folder, keep=1) as checkpoints,
        ):
            start = time.perf_counter()
            checkpoints.save(state, Record(1, 0, {}, "base", "hash", "data"))
            checkpoints.wait()
            seconds["save"].append(time.perf_counter() - start)
            seconds["hash at save"].append(sum(hashing))
            start = time.perf_counter()
            checkpoints.verify(1)
            seconds["hash at restore"].append(time.perf_counter() - start)
            start = time.perf_counter()
            checkpoints.restore(1, state)
            seconds["restore"].append(time.perf_counter() - start + seconds["hash at restore"][-1])
    shutil.rmtree(options.folder)
    medians = {name: round(statistics.median(values), 4) for name, values in seconds.items()}
    shares = {name: round(100 * medians[f"hash at {name}"] / medians[name], 2) for name in ("save", "restore")}
    print(json.dumps({"megabytes": options.megabytes, "median seconds": medians, "percent of": shares}, indent=2))


if __name__ == "__main__":
    main()
