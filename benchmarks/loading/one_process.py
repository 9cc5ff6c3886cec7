"""Loads a model directory once, in this process: wall and processor seconds, and host memory beyond the parameters.

    sh -c '"$@"' sh python benchmarks/loading/one_process.py DIR [--quantize nf4] [--dtype float32]

Through a shell, so that the kernel's figure for peak memory is this process's own. `load_job.write_model` of
tests/weights writes random models; `benchmarks/loading/run.py --keep` leaves its own in place.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import time

import jax

from meshtune.quantize.config import QuantizeConfig
from meshtune.weights.load import load_params, load_spec, resident


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("directory", type=pathlib.Path)
    options.add_argument("--quantize")
    options.add_argument("--dtype")
    arguments = options.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.numpy.zeros(3).block_until_ready()
    spec, _ = load_spec(arguments.directory, arguments.dtype)
    before, used, start = resident(), resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    load = os.getloadavg()[0]
    quantize = QuantizeConfig(arguments.quantize) if arguments.quantize else None
    params = jax.block_until_ready(load_params(arguments.directory, spec, quantize=quantize))
    wall, total = time.monotonic() - start, resource.getrusage(resource.RUSAGE_SELF)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    files = sum(file.stat().st_size for file in arguments.directory.glob("*.safetensors"))
    figures = {
        "wall_seconds": round(wall, 2),
        "user_seconds": round(total.ru_utime - used.ru_utime, 2),
        "system_seconds": round(total.ru_stime - used.ru_stime, 2),
        "gb_per_second": round(files / wall / 1e9, 2),
        "parameters_mib": size >> 20,
        "beyond_mib": (total.ru_maxrss * 1024 - before - size) >> 20,
        "load_average": round(load, 1),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
