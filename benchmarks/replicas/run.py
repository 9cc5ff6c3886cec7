"""How much faster two replicas of `meshtune predict` answer than one process: wall and processor seconds.

    python benchmarks/replicas/run.py MODEL --json benchmarks/replicas/result.json

Records of 2 and of BLOCKS blocks are answered by each; the difference is the time of blocks only, without imports,
loading and compilation.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

from meshtune.evaluate.blocks import RECORDS

TOKENS = 48
STORY = "Once upon a time there was a dog named Max. "


def measure(model: str, folder: pathlib.Path, blocks: int, replicas: int) -> dict[str, float]:
    """Wall and processor seconds of answering some blocks of records, and the load of the machine before."""
    data, output = folder / f"{blocks}.jsonl", folder / f"{blocks}-{replicas}"
    rows = [{"prompt": STORY[: 8 + number % 30], "completion": " The end."} for number in range(blocks * RECORDS)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "meshtune", "predict", model, "--data", str(data), "--output", str(output)]
    command += ["--metrics", "f1", "--no-loss", "--max-tokens", str(TOKENS), "--replicas", str(replicas)]
    before, load, started = resource.getrusage(resource.RUSAGE_CHILDREN), os.getloadavg()[0], time.monotonic()
    subprocess.run(command, check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall": time.monotonic() - started, "processor": processor, "load": load}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--blocks", type=int, default=66)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    options = parser.parse_args()
    result: dict[str, object] = {"records": options.blocks * RECORDS, "tokens": TOKENS}
    result["versions"] = {name: importlib.metadata.version(name) for name in ("jax", "meshtune")}
    result["cores"] = len(os.sched_getaffinity(0))
    seconds: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        measure(options.model, pathlib.Path(folder), 1, 1)  # fills the cache of compiled programs
        for replicas in (1, 2):
            few = measure(options.model, pathlib.Path(folder), 2, replicas)
            many = measure(options.model, pathlib.Path(folder), options.blocks, replicas)
            seconds[replicas] = {name: many[name] - few[name] for name in ("wall", "processor")}
            result[f"replicas: {replicas}"] = {"2 blocks": few, "all": many, "blocks only": seconds[replicas]}
    result["speedup"] = seconds[1]["wall"] / seconds[2]["wall"]
    options.json.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
