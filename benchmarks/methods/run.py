"""Compares every method and optimizer on SmolLM2-135M with the same data and the same budget of tokens.

    python benchmarks/methods/run.py MODEL ALPACA.json [arm ...]    run the arms without a result, or those named
    python benchmarks/methods/run.py                                only rewrite the table and the plot

Rows, their order and the held-out records are the same for all arms. Each arm runs in a process of its own and is added
to result.json beside this file. The table of RESULTS.md and docs/images/methods.png are generated from it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
from typing import Any

FOLDER = pathlib.Path(__file__).resolve().parent
RESULT = FOLDER / "result.json"
DOCS = FOLDER.parents[1] / "docs"
BEGIN, END = "<!-- benchmarks/methods/run.py writes from here -->\n", "<!-- to here -->\n"
STEPS, ROWS, LENGTH = 20, 2, 128
WARM_UP = 5  # updates that are not timed
MIB = 1 << 20
COLORS = {"adapters": "#2f6fde", "some layers": "#12a594", "all weights": "#f2a93b"}
INK, GRID = "#1f2933", "#e4e7eb"

# Rates are the product's defaults for longer runs, times a factor for so short a run. None was searched for, except
# OFT's: with LORA its first run ended above the loss before tuning.
LORA, FULL = 5e-4, 5e-5


def lora(rate: float = LORA, optimizer: dict[str, Any] | None = None, **method: Any) -> dict[str, Any]:
    return {
        "method": {"kind": "lora", "rank": 16, "alpha": 32, **method},
        "optimizer": {"learning_rate": rate, **(optimizer or {})},
    }


def full(name: str = "adamw", rate: float = FULL, **optimizer: Any) -> dict[str, Any]:
    return {"method": "full", "optimizer": {"name": name, "learning_rate": rate, **optimizer}}


IN_BACKWARD = {"in_backward": True, "max_grad_norm": None}
ARMS: dict[str, dict[str, Any]] = {
    "lora": lora(),
    "lora+": lora(LORA / 4, {"lora_plus_ratio": 16.0}),
    "rslora": lora(LORA / 4, rslora=True),
    "dora": lora(adapter="dora"),
    "pissa": lora(LORA / 10, adapter="pissa"),
    "vera": {
        "method": {"kind": "lora", "adapter": "vera", "rank": 64},
        "optimizer": {"learning_rate": 10 * LORA},
    },
    "oft": {
        "method": {"kind": "lora", "adapter": "oft", "oft_block_size": 32},
        "optimizer": {"learning_rate": LORA / 5},
    },
    "lora, nf4": {**lora(), "quantize": "nf4"},
    "loftq, nf4": {**lora(adapter="loftq"), "quantize": "nf4"},
    "lora, int8": {**lora(), "quantize": "int8"},
    "freeze, last 4 layers": {
        "method": {"kind": "freeze", "last_layers": 4},
        "optimizer": {"learning_rate": FULL},
    },
    "llama_pro, 3 blocks": {
        "method": {"kind": "llama_pro", "blocks": 3},
        "optimizer": {"learning_rate": 2 * FULL},
    },
    "full, adamw": full(),
    "full, adamw8bit": full("adamw8bit"),
    "full, adam_mini": full("adam_mini"),
    "full, muon": full("muon", 4 * FULL),
    "full, galore": full("galore", 4 * FULL, rank=64, update_gap=20),
    "full, apollo": full("apollo", 4 * FULL, rank=64, update_gap=20),
    "full, badam": full("badam", 2 * FULL, switch_every=4),
    "full, adafactor": full("adafactor"),
    "full, lion": full("lion", FULL / 5),
    "full, sgd": full("sgd", 0.02, momentum=0.9),
    "full, sophia": full("sophia"),
    "full, schedule_free": full("schedule_free", 2 * FULL, schedule="constant"),
    "full, prodigy": full("prodigy", 1.0),
    "full, adamw, in backward": full(**IN_BACKWARD),
    "full, adamw8bit, in backward": full("adamw8bit", **IN_BACKWARD),
    "full, adamw, in backward, on the host": {**full(**IN_BACKWARD), "compute": {"offload": ["optimizer", "weights"]}},
}


def recipe(arm: str, model: str, data: str, output: str) -> dict[str, Any]:
    return {
        "model": model,
        "data": {"train": [{"path": data}], "validation": 24, "max_length": LENGTH},
        "output": output,
        "train": {"steps": STEPS, "batch_size": ROWS},
        "eval": {"every": STEPS, "at_start": True},
        "checkpoint": {"every": STEPS},
        **ARMS[arm],
    }


def measure(arm: str, model: str, data: str) -> dict[str, Any]:
    """Runs one arm in a process of its own and collects its results."""
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder) / "run"
        file = pathlib.Path(folder) / "recipe.json"
        file.write_text(json.dumps(recipe(arm, model, data, str(output))))
        ran = subprocess.run([sys.executable, "-m", "meshtune", "train", str(file)], capture_output=True, text=True)
        if ran.returncode:
            sys.exit(f"{arm}: {ran.stdout[-3000:]}{ran.stderr[-3000:]}")
        rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        prediction = json.loads((output / "run.json").read_text())["prediction"]
        evaluations = [row["loss"] for row in rows if row["kind"] == "eval"]
        seconds = [row["seconds"] for row in rows if row["kind"] == "train"]
        checkpoint = max((output / "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime)
        return {
            "loss_before": evaluations[0],
            "loss": evaluations[-1],
            "predicted_bytes": prediction["predicted"]["device_bytes"],
            "measured_bytes": prediction["measured"]["device_bytes"],
            "step_seconds": statistics.median(seconds[WARM_UP:]),
            "checkpoint_bytes": sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()),
            "losses": [row["loss"] for row in rows if row["kind"] == "train"],
        }


def table(runs: dict[str, dict[str, Any]]) -> str:
    """The results as a Markdown table, in MiB and seconds."""
    lines = [
        "| arm | held-out loss | predicted memory, MiB | measured, MiB | step, s | checkpoint, MiB |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for arm, run in runs.items():
        predicted, measured, checkpoint = (
            "-" if run[key] is None else f"{run[key] / MIB:,.0f}"
            for key in ("predicted_bytes", "measured_bytes", "checkpoint_bytes")
        )
        loss, seconds = run["loss"], run["step_seconds"]
        lines.append(f"| {arm} | {loss:.3f} | {predicted} | {measured} | {seconds:.2f} | {checkpoint} |")
    return "\n".join(lines) + "\n"


def group_of(arm: str) -> str:
    """The group of an arm: what it trains."""
    if arm.startswith("full"):
        return "all weights"
    return "some layers" if arm.startswith(("freeze", "llama_pro")) else "adapters"


def draw(runs: dict[str, dict[str, Any]]) -> None:
    """A row per arm, grouped by what it trains and ordered by loss: held-out loss (left) and peak memory (right).

    The losses on a quantised nf4 base are far above the others; they are drawn at the edge, with their value.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    order = sorted(runs, key=lambda arm: (list(COLORS).index(group_of(arm)), runs[arm]["loss"]))
    before = next(iter(runs.values()))["loss_before"]
    low = min(run["loss"] for run in runs.values()) - 0.011
    high = before + 0.012
    figure = Figure(figsize=(11, 9), dpi=130, layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(5, 4))
    for row, arm in enumerate(order):
        run, color = runs[arm], COLORS[group_of(arm)]
        loss, gib = run["loss"], run["measured_bytes"] / 2**30
        beyond = loss > high
        left.plot([before, min(loss, high)], [row, row], color=color, linewidth=1.4, alpha=0.5, zorder=1)
        left.plot(min(loss, high), row, marker=">" if beyond else "o", color=color, markersize=7, zorder=2)
        # To the left of the line between the loss before tuning and the loss after it.
        left.annotate(f"{loss:.3f}", (min(loss, before), row), xytext=(-8, 0), textcoords="offset points", ha="right",
                      va="center", fontsize=8.5, color=INK)  # fmt: skip
        right.barh(row, gib, color=color, height=0.6)
        right.annotate(f"{gib:.2f}", (gib, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8.5,
                       color=INK)  # fmt: skip
    left.axvline(before, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    left.annotate("before tuning", (before, -0.9), xytext=(-5, 0), textcoords="offset points", fontsize=8.5, ha="right",
                  va="center", color=INK)  # fmt: skip
    quantised = [row for row, arm in enumerate(order) if runs[arm]["loss"] > high]
    if quantised:
        place = (before, statistics.mean(quantised))
        left.annotate("4 bits (nf4) cost so small a base\nmore than these updates gain", place,
                      xytext=(-55, 0), textcoords="offset points", fontsize=8.5, ha="right", va="center",
                      color=INK)  # fmt: skip
    left.set_xlim(low, high + 0.002)
    left.set_ylim(len(order) - 0.4, -1.5)
    left.set_yticks(range(len(order)), order, fontsize=9.5)
    left.set_title("held-out loss (lower is better)", loc="left", fontsize=11, color=INK)
    right.set_xlim(0, 1.12 * max(run["measured_bytes"] for run in runs.values()) / 2**30)
    right.set_title("peak memory (GiB)", loc="left", fontsize=11, color=INK)
    for axes in (left, right):
        axes.grid(axis="x", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=INK, length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
    for group, color in COLORS.items():
        right.barh(0, 0, color=color, label=group)
    right.legend(title="what is trained", frameon=False, loc="upper right", fontsize=9.5, title_fontsize=9.5)
    figure.suptitle(
        f"SmolLM2-135M, {STEPS} updates of {ROWS * LENGTH} tokens: each method runs; so few updates rank nothing",
        x=0.01,
        ha="left",
        fontsize=13,
        color=INK,
    )
    FigureCanvasAgg(figure).print_png(DOCS / "images/methods.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("data", nargs="?")
    parser.add_argument("arms", nargs="*")
    options = parser.parse_args()
    filed: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    runs: dict[str, Any] = filed.get("runs", {})
    missing = [arm for arm in ARMS if arm not in runs]
    for arm in (options.arms or missing) if options.data else []:
        runs[arm] = measure(arm, options.model, options.data)
        print(f"{arm}: {runs[arm]['loss_before']:.3f} -> {runs[arm]['loss']:.3f}", flush=True)
        about = {
            "date": datetime.date.today().isoformat(),
            "command": "python benchmarks/methods/run.py MODEL ALPACA.json",
            "python": platform.python_version(),
            "machine": f"{platform.machine()}, {platform.system()}",
            "recipe": recipe("lora", "SmolLM2-135M-Instruct", "alpaca_en_demo.json", "run"),
            "arms": ARMS,
        }
        RESULT.write_text(json.dumps(about | {"runs": runs, "notes": filed.get("notes", {})}, indent=1) + "\n")
    runs = {arm: runs[arm] for arm in ARMS if arm in runs}
    page = FOLDER / "RESULTS.md"
    before, after = page.read_text().split(BEGIN)
    page.write_text(before + BEGIN + table(runs) + END + after.split(END)[1])
    draw(runs)


if __name__ == "__main__":
    main()
