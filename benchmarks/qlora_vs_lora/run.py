"""QLoRA beside LoRA: the same run of SmolLM2-135M on alpaca, on the base as it is and in each quantised format.

    python benchmarks/qlora_vs_lora/run.py MODEL ALPACA.json [--steps 100] [--formats none nf4 int8]
        [--rank 8] [--rate 2e-4] [--rows 1] [--result result.json]

Seed, rows and their order are the same, so losses are compared update by update. A format after "loftq-" begins with
adapters that make up for what quantising lost, after "loftq:64-" for what counts of it on 64 rows of the data;
nf4/k_proj=int8,v_proj=int8 gives modules formats of their own. Writes the result beside this file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import platform
import subprocess
import sys
import tempfile
from typing import Any

HERE = pathlib.Path(__file__).parent


def recipe(model: str, data: str, output: str, quantize: str, asked: argparse.Namespace) -> dict[str, Any]:
    adapter, _, name = quantize.rpartition("-")
    adapter, _, rows = adapter.partition(":")
    name, _, own = name.partition("/")
    modules = dict(one.split("=") for one in own.split(",") if one)
    return {
        "model": model,
        "data": {"train": [{"path": data}], "validation": 16, "max_length": 128},
        "output": output,
        "method": {
            "rank": asked.rank,
            "alpha": 2 * asked.rank,
            "adapter": adapter or "lora",
            "loftq_calibration": int(rows or 0),
        },
        "quantize": None if name == "none" else {"format": name, "modules": modules},
        "train": {"steps": asked.steps, "batch_size": asked.rows},
        "optimizer": {"learning_rate": asked.rate},
        "eval": {"every": asked.steps},
        "checkpoint": {"every": asked.steps},
    }


def one(arguments: argparse.Namespace) -> None:
    """In a process of its own: one run, its figures as a line of JSON."""
    import jax

    from meshtune.config.load import load_recipe
    from meshtune.train.run import train

    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder) / "run"
        fields = recipe(arguments.model, arguments.data, str(output), arguments.one, arguments)
        train(load_recipe(fields))
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    evaluated = [line["loss"] for line in lines if line["kind"] == "eval"]
    print("RESULT " + json.dumps({"losses": losses, "eval": evaluated, "jax": jax.__version__}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--formats", nargs="+", default=["none", "nf4"])
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--rows", type=int, default=1, help="packed rows of 128 tokens an update")
    parser.add_argument("--result", default="result.json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        one(arguments)
        return
    found: dict[str, Any] = {}
    for name in arguments.formats:
        done = subprocess.run([sys.executable, *sys.argv, "--one", name], capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if done.returncode or not lines:
            sys.exit(done.stdout[-2000:] + done.stderr[-4000:])
        found[name] = json.loads(lines[-1].removeprefix("RESULT "))
        print(name, "last ten updates:", mean(found[name]["losses"][-10:]), "validation:", found[name]["eval"][-1:])
    about = {
        "date": datetime.date.today().isoformat(),
        "command": f"python benchmarks/qlora_vs_lora/run.py MODEL ALPACA.json {' '.join(sys.argv[3:])}",
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {platform.system()}",
        "recipe": recipe("SmolLM2-135M-Instruct", "alpaca.json", "run", "nf4", arguments),
    }
    (HERE / arguments.result).write_text(json.dumps(about | {"runs": found}, indent=1) + "\n")


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
