"""Seconds to the first token and to the first update of a model, of one source tree or of two in turn.

    python benchmarks/loading/startup.py MODEL --tree after=src [--tree before=../old/src] [--rounds 3] [--json FILE]

Each measurement is a process of its own: `meshtune generate` of one token, and `meshtune train` of one LoRA update of a
row of 128 tokens without a validation set. Wall time and processor time (user and system) of the whole process, without
a compilation cache; on a machine that others use the processor time is the figure to compare.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import resource
import subprocess
import sys
import tempfile
import time
from importlib import metadata

Seconds = dict[str, float]


def run(command: list[str], source: pathlib.Path) -> Seconds:
    """Wall and processor seconds of `python -m meshtune ...`, and the load average when it began."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"PYTHONPATH": str(source.resolve()), "JAX_PLATFORMS": "cpu"}
    load, used, start = os.getloadavg()[0], resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run([sys.executable, "-m", "meshtune", *command], env=environment, capture_output=True, text=True)
    wall, total = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    cpu = total.ru_utime + total.ru_stime - used.ru_utime - used.ru_stime
    return {"wall": round(wall, 2), "cpu": round(cpu, 2), "load": round(load, 1)}


def first_token(model: pathlib.Path, source: pathlib.Path) -> Seconds:
    return run(["generate", str(model), "--chat", "-p", "Give a synonym for 'happy'.", "-n", "1"], source)


def first_update(model: pathlib.Path, source: pathlib.Path) -> Seconds:
    with tempfile.TemporaryDirectory() as folder:
        data = pathlib.Path(folder) / "data.json"
        rows = [{"instruction": f"Add {n} and 1.", "input": "", "output": str(n + 1)} for n in range(40)]
        data.write_text(json.dumps(rows))
        recipe = {
            "model": str(model),
            "output": f"{folder}/run",
            "method": {"kind": "lora", "rank": 8, "targets": "all-linear"},
            "data": {"train": str(data), "max_length": 128},
            "train": {"steps": 1, "batch_size": 1},
            "optimizer": {"learning_rate": 2e-4},
        }
        file = pathlib.Path(folder) / "recipe.yaml"  # JSON is YAML
        file.write_text(json.dumps(recipe))
        return run(["train", str(file)], source)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model", type=pathlib.Path)
    options.add_argument("--tree", action="append", required=True, metavar="NAME=PATH")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--json", type=pathlib.Path)
    arguments = options.parse_args()
    trees = {name: pathlib.Path(path) for name, path in (tree.split("=", 1) for tree in arguments.tree)}
    results: dict[str, list[Seconds]] = {}
    for number in range(arguments.rounds):
        for kind, measure in (("first token", first_token), ("first update", first_update)):
            for name, source in trees.items():
                seconds = measure(arguments.model, source)
                results.setdefault(f"{kind}, {name}", []).append(seconds)
                print(number, kind, name, seconds, flush=True)
    if arguments.json:
        about = {
            "date": datetime.date.today().isoformat(),
            "model": arguments.model.name,
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            **{name: metadata.version(name) for name in ("jax", "jaxlib", "numpy")},
        }
        arguments.json.write_text(json.dumps({"about": about, "runs": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
