"""Is a refactoring slower? The same LoRA run by two source trees in turn: start-up, compiling, updates.

    python benchmarks/refactor_gate/speed.py MODEL --tree before=../old/src --tree after=src [--rounds 3] [--json FILE]

Every measurement is a process: `meshtune train` of MODEL with rank 8 on every linear layer, four rows of 256 tokens an
update, 12 updates. Reported are medians over the rounds, and the ratio of the last tree to the first, of: processor
seconds of `import meshtune.train.run`, seconds of compiling the step, seconds of an update (the median of the last
eight), and processor seconds of the whole run. Nothing else should run beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import resource
import statistics
import subprocess
import sys
import tempfile

UPDATES, ROWS, LENGTH = 12, 4, 256


def processor_seconds(command: list[str], source: pathlib.Path) -> tuple[float, str]:
    """(user and system seconds of a process, what it printed)."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {
        "PYTHONPATH": str(source.resolve()),
        "JAX_PLATFORMS": "cpu",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "200",
    }
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def measure(model: pathlib.Path, source: pathlib.Path) -> dict[str, float]:
    """One run of one tree."""
    start_up, _ = processor_seconds([sys.executable, "-c", "import meshtune.train.run"], source)
    with tempfile.TemporaryDirectory() as folder:
        data = pathlib.Path(folder) / "data.json"
        records = [{"instruction": f"Add {n} and 1.", "input": "", "output": f"{n + 1}. " * 30} for n in range(200)]
        data.write_text(json.dumps(records))
        recipe = {
            "model": str(model.resolve()),
            "output": f"{folder}/run",
            "method": {"kind": "lora", "rank": 8, "targets": "all-linear"},
            "data": {"train": str(data), "max_length": LENGTH},
            "train": {"steps": UPDATES, "batch_size": ROWS},
            "log": {"every": 1},
        }
        file = pathlib.Path(folder) / "recipe.yaml"  # JSON is YAML
        file.write_text(json.dumps(recipe))
        whole, out = processor_seconds([sys.executable, "-m", "meshtune", "train", str(file)], source)
        lines = (pathlib.Path(folder) / "run/metrics.jsonl").read_text().splitlines()
    found = re.search(r"compiled the training step in ([\d.]+) s", out)
    assert found is not None, out
    rows = [row for row in map(json.loads, lines) if row["kind"] == "train"]
    updates = [row["seconds"] for row in rows]
    return {
        "start-up": start_up,
        "compiling": float(found[1]),
        "update": statistics.median(updates[-8:]),
        "whole run": whole,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--tree", action="append", required=True, metavar="NAME=SRC")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    trees = {name: pathlib.Path(path) for name, _, path in (tree.partition("=") for tree in options.tree)}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for _ in range(options.rounds):
        for name, source in trees.items():
            rounds[name].append(measure(options.model, source))
            print(name, {key: round(value, 3) for key, value in rounds[name][-1].items()}, flush=True)
    medians = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in rounds.items()
    }
    first, *_, last = medians.values()
    ratios = {key: last[key] / first[key] for key in first}
    print("ratio", {key: round(value, 3) for key, value in ratios.items()})
    if options.json:
        options.json.write_text(json.dumps({"rounds": rounds, "medians": medians, "ratios": ratios}, indent=1) + "\n")


if __name__ == "__main__":
    main()
