"""What digests cost a save and a restore: seconds of each and of what waits for hashing within it.

    python benchmarks/checkpoint_digests/run.py [--megabytes 512] [--rounds 5] [--folder /tmp/checkpoint_digests]

The state is random float32 numbers, which do not compress. A save lasts until it is on disk; training waits for a small
part of that, and for none of the hashing. Hashing runs beside the writing of a save and the opening of a directory of
checkpoints; `wait` is what is left of it when they are done, `hashing` what it takes alone, afterwards.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import statistics
import time
from collections.abc import Callable
from unittest import mock

import jax.numpy as jnp
import numpy as np

from meshtune.train.checkpoint import state_handler
from meshtune.train.checkpoint.checkpoints import Checkpoints, Record
from meshtune.train.checkpoint.state_handler import Follower
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
    names = ("save", "wait at save", "open and restore", "wait at restore", "hashing")
    seconds: dict[str, list[float]] = {name: [] for name in names}

    def timed(waits: list[float], function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            start = time.perf_counter()
            result = function(*arguments)
            waits.append(time.perf_counter() - start)
            return result

        return call

    for number in range(options.rounds):
        shutil.rmtree(options.folder, ignore_errors=True)
        state = TrainState(jnp.int32(number), weights, ())
        waits: list[float] = []
        with (
            mock.patch.object(state_handler, "digest_files", timed(waits, state_handler.digest_files)),
            mock.patch.object(Follower, "digests", timed(waits, Follower.digests)),
            mock.patch.object(Follower, "__exit__", timed(waits, Follower.__exit__)),
            Checkpoints(options.folder, keep=1) as checkpoints,
        ):
            start = time.perf_counter()
            checkpoints.save(state, Record(1, 0, {}, "base", "hash", "data"))
            checkpoints.wait()
            seconds["save"].append(time.perf_counter() - start)
            seconds["wait at save"].append(sum(waits))
        start = time.perf_counter()
        with Checkpoints(options.folder, keep=1) as checkpoints:
            opened = time.perf_counter()
            checkpoints.verify(1)
            seconds["wait at restore"].append(time.perf_counter() - opened)
            checkpoints.restore(1, state)
            seconds["open and restore"].append(time.perf_counter() - start)
            start = time.perf_counter()
            checkpoints.verify(1)
            seconds["hashing"].append(time.perf_counter() - start)
    shutil.rmtree(options.folder)
    medians = {name: round(statistics.median(values), 4) for name, values in seconds.items()}
    parts = {"save": "wait at save", "open and restore": "wait at restore"}
    shares = {name: round(100 * medians[part] / medians[name], 2) for name, part in parts.items()}
    print(json.dumps({"megabytes": options.megabytes, "median seconds": medians, "percent of": shares}, indent=2))


if __name__ == "__main__":
    main()
