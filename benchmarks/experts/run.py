"""Updates of a mixture of experts on a CPU: Meshtune beside transformers with peft, one update of each in turn.

    python benchmarks/experts/run.py [--updates 9] [--methods lora,full] [--json FILE]

All programs hold the same model (model.py) in float32 and see the same tokens; each has two threads. transformers
computes experts in three ways (`experts_implementation`), of which those named by --experts are measured. The first
updates, in which programs are compiled and memory is got, are left out. Figures are medians; a ratio is the median of
those of updates that followed each other. Beside seconds there are seconds of processor time, which programs that run
beside the benchmark change less.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from model import CONFIG, LENGTH, METHODS, ROWS, write_model

HERE = pathlib.Path(__file__).resolve().parent
THREADS, WARM_UP = 2, 2


@contextlib.contextmanager
def program(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"OMP_NUM_THREADS": str(THREADS), "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, str(HERE / script), *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        yield process
    finally:
        process.kill()


def answer(process: subprocess.Popen[str]) -> dict[str, float]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"ended: {process.args}"
    return json.loads(line)


def update(process: subprocess.Popen[str]) -> dict[str, float]:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return answer(process)


def measured(folder: str, method: str, experts: list[str], updates: int) -> dict[str, Any]:
    """Seconds and losses of every update of a method, and what they come to."""
    with contextlib.ExitStack() as stack:
        programs = {"meshtune": stack.enter_context(program("meshtune_side.py", folder, method))}
        programs |= {name: stack.enter_context(program("torch_side.py", folder, method, name)) for name in experts}
        counts = {name: answer(process)["parameters"] for name, process in programs.items()}
        records: dict[str, list[dict[str, float]]] = {name: [] for name in programs}
        for number in range(WARM_UP + updates):
            for name in programs if number % 2 else reversed(programs):
                records[name].append(update(programs[name]))
                print(method, number, name, json.dumps(records[name][-1]), flush=True)
    measured = {"parameters": counts, "losses": {name: [run["loss"] for run in runs] for name, runs in records.items()}}
    return measured | {kind: compared(records, experts, kind) for kind in ("seconds", "processor")}


def compared(records: dict[str, list[dict[str, float]]], experts: list[str], kind: str) -> dict[str, Any]:
    """Seconds of a kind after the first updates: medians, the fastest way of transformers, and its time over ours."""
    runs = {name: [record[kind] for record in updates[WARM_UP:]] for name, updates in records.items()}
    medians = {name: statistics.median(values) for name, values in runs.items()}
    best = min(experts, key=lambda name: medians[name])
    ratios = [theirs / ours for theirs, ours in zip(runs[best], runs["meshtune"], strict=True)]
    summary = {"ratio": statistics.median(ratios), "range": [min(ratios), max(ratios)]}
    return {"runs": runs, "medians": medians, "best": best} | summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=9)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--experts", default="eager,grouped_mm", help="how transformers computes the experts")
    parser.add_argument("--json", type=pathlib.Path, help="the methods' results are added to those in the file")
    options = parser.parse_args()
    results: dict[str, Any] = (
        json.loads(options.json.read_text()) if options.json and options.json.exists() else {"methods": {}}
    )
    with tempfile.TemporaryDirectory() as folder:
        write_model(pathlib.Path(folder))
        for method in options.methods.split(","):
            results["methods"][method] = measured(folder, method, options.experts.split(","), options.updates)
            about = {"date": datetime.date.today().isoformat(), "python": platform.python_version()}
            about |= {name: metadata.version(name) for name in ("jax", "torch", "transformers", "peft")}
            results |= {"about": about, "model": CONFIG, "batch": [ROWS, LENGTH], "threads": THREADS}
            if options.json:
                options.json.write_text(json.dumps(results, indent=1) + "\n")
            for kind in ("seconds", "processor"):
                print(method, kind, json.dumps(results["methods"][method][kind]))


if __name__ == "__main__":
    main()
