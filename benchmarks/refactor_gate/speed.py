"""Is a refactoring slower? The same work by two source trees in turn: start-up, a LoRA run, generation.

    python benchmarks/refactor_gate/speed.py MODEL --tree before=../old/src --tree after=src [--rounds 3]
        [--only commands train decode] [--json FILE]

Every measurement is a process. Reported are medians over the rounds, and the ratio of the last tree to the first:

- commands: processor seconds of `meshtune --help`, of `meshtune train` of a recipe with a wrong key, and of
  `import meshtune.train.run`;
- train: `meshtune train` of MODEL with rank 8 on every linear layer, four rows of 256 tokens an update, 12 updates:
  seconds of compiling the step, seconds of an update (the median of the last eight), processor seconds of the run;
- decode: the engine's greedy generation after eight prompts of 128 random tokens, float32: processor seconds of reading
  them and the first token, and of a further token of all (the best of three times 32, once all is compiled).

Nothing else should run beside it; where something does, processor seconds are the figures to compare.
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


def processor_seconds(command: list[str], source: pathlib.Path, status: int = 0) -> tuple[float, str]:
    """(user and system seconds of a process that exits with `status`, its output)."""
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
    assert done.returncode == status, done.stdout[-2000:] + done.stderr[-2000:]
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def measure_commands(model: pathlib.Path, source: pathlib.Path) -> dict[str, float]:
    """Processor seconds of what only starts."""
    meshtune = [sys.executable, "-m", "meshtune"]
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "recipe.yaml"
        file.write_text(f"{{model: {model.resolve()}, data: none.jsonl, output: run, method: {{rnak: 8}}}}")
        return {
            "--help": processor_seconds([*meshtune, "--help"], source)[0],
            "wrong key": processor_seconds([*meshtune, "train", str(file)], source, status=2)[0],
            "import of train": processor_seconds([sys.executable, "-c", "import meshtune.train.run"], source)[0],
        }


DECODE = """
import json, sys, time
import numpy as np
import meshtune
engine = meshtune.load(sys.argv[1], dtype="float32").engine
rng = np.random.default_rng(0)
def seconds(new):
    prompts = rng.integers(100, engine.spec.vocab, (8, 128)).tolist()
    start = time.process_time()
    engine.generate(prompts, max_tokens=new, stop_ids=[])
    return time.process_time() - start
seconds(33)
pairs = [(seconds(1), seconds(33)) for _ in range(3)]
first, all_ = (min(column) for column in zip(*pairs))
print(json.dumps({"first token": first, "further token": (all_ - first) / 32}))
"""


def measure_decode(model: pathlib.Path, source: pathlib.Path) -> dict[str, float]:
    """Processor seconds of generation by the engine."""
    _, out = processor_seconds([sys.executable, "-c", DECODE, str(model.resolve())], source)
    return json.loads(out.splitlines()[-1])


def measure_train(model: pathlib.Path, source: pathlib.Path) -> dict[str, float]:
    """One run of one tree."""
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
        "compiling": float(found[1]),
        "update": statistics.median(updates[-8:]),
        "whole run": whole,
    }


MEASURES = {"commands": measure_commands, "train": measure_train, "decode": measure_decode}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--tree", action="append", required=True, metavar="NAME=SRC")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    trees = {name: pathlib.Path(path) for name, _, path in (tree.partition("=") for tree in options.tree)}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for _ in range(options.rounds):
        for name, source in trees.items():
            rounds[name].append({})
            for measure in options.only:
                rounds[name][-1] |= MEASURES[measure](options.model, source)
            print(name, {key: round(value, 4) for key, value in rounds[name][-1].items()}, flush=True)
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
