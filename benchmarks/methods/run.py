"""Every method and optimizer on SmolLM2-135M and the same real data, with the same budget of tokens.

    python benchmarks/methods/run.py MODEL ALPACA.json [arm ...]

Rows, their order and the held-out records are the same for all arms. Each runs in a process of its own; result.json,
beside this file, grows by an arm at a time, and an arm that is in it is not run again unless named. The table of
docs/choosing.md and docs/images/methods.png are made of it.
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

HERE = pathlib.Path(__file__).resolve().parent
RESULT = HERE / "result.json"
DOCS = HERE.parents[1] / "docs"
BEGIN, END = "<!-- benchmarks/methods/run.py writes from here -->\n", "<!-- to here -->\n"
STEPS, ROWS, LENGTH = 20, 2, 128
WARM = 5  # updates that are not timed
MIB = 1 << 20

# Rates are those of the product's defaults for longer runs times a factor for so short a one; none was searched for,
# but for OFT's: at LORA its first run ended above the loss before tuning.
LORA, FULL = 5e-4, 5e-5


def lora(rate: float = LORA, optimizer: dict[str, Any] | None = None, **method: Any) -> dict[str, Any]:
    return {
        "method": {"kind": "lora", "rank": 16, "alpha": 32, **method},
        "optimizer": {"learning_rate": rate, **(optimizer or {})},
    }


def full(name: str = "adamw", rate: float = FULL, **optimizer: Any) -> dict[str, Any]:
    return {"method": "full", "optimizer": {"name": name, "learning_rate": rate, **optimizer}}


FUSED = {"in_backward": True, "max_grad_norm": None}
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
    "full, adamw, fused": full(**FUSED),
    "full, adamw8bit, fused": full("adamw8bit", **FUSED),
    "full, adamw, fused, on the host": {**full(**FUSED), "compute": {"offload": ["optimizer", "weights"]}},
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


def measured(arm: str, model: str, data: str) -> dict[str, Any]:
    """One run in a process of its own, and what it left."""
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder) / "run"
        file = pathlib.Path(folder) / "recipe.json"
        file.write_text(json.dumps(recipe(arm, model, data, str(output))))
        ran = subprocess.run([sys.executable, "-m", "meshtune", "train", str(file)], capture_output=True, text=True)
        if ran.returncode:
            sys.exit(f"{arm}: {ran.stdout[-3000:]}{ran.stderr[-3000:]}")
        rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        prediction = json.loads((output / "run.json").read_text())["prediction"]
        evaluated = [row["loss"] for row in rows if row["kind"] == "eval"]
        seconds = [row["seconds"] for row in rows if row["kind"] == "train"]
        saved = max((output / "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime)
        return {
            "loss_before": evaluated[0],
            "loss": evaluated[-1],
            "predicted_bytes": prediction["predicted"]["device_bytes"],
            "measured_bytes": prediction["measured"]["device_bytes"],
            "step_seconds": statistics.median(seconds[WARM:]),
            "checkpoint_bytes": sum(path.stat().st_size for path in saved.rglob("*") if path.is_file()),
            "losses": [row["loss"] for row in rows if row["kind"] == "train"],
        }


def table(runs: dict[str, dict[str, Any]]) -> str:
    """The arms in Markdown, in MiB and seconds."""
    lines = [
        "| arm | held-out loss | predicted memory | measured | step | checkpoint |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for arm in ARMS:
        if arm in runs:
            run = runs[arm]
            predicted, found, kept = (
                "-" if run[key] is None else f"{run[key] / MIB:,.0f} MiB"
                for key in ("predicted_bytes", "measured_bytes", "checkpoint_bytes")
            )
            loss, seconds = run["loss"], run["step_seconds"]
            lines.append(f"| {arm} | {loss:.3f} | {predicted} | {found} | {seconds:.2f} s | {kept} |")
    return "\n".join(lines) + "\n"


def draw(runs: dict[str, dict[str, Any]]) -> None:
    """Held-out loss against measured memory, an arm a numbered point; what lies far above the start is at the edge."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 6.4))
    before = next(iter(runs.values()))["loss_before"]
    top = before + 0.006
    order = sorted(runs, key=lambda arm: runs[arm]["measured_bytes"])
    names = []
    for number, arm in enumerate(order, 1):
        run = runs[arm]
        adapter = not arm.startswith(("full", "freeze", "llama_pro"))
        where = (run["measured_bytes"] / 2**30, min(run["loss"], top))
        axes.scatter(*where, s=190, color="tab:blue" if adapter else "tab:orange", alpha=0.55, clip_on=False, zorder=2)
        axes.annotate(str(number), where, ha="center", va="center", fontsize=7, zorder=3)
        names.append(f"{number:2}  {arm}" + (f" ({run['loss']:.3f}, off the plot)" if run["loss"] > top else ""))
    axes.axhline(before, color="grey", linewidth=0.8, linestyle="--", zorder=1)
    axes.text(5, before, "before tuning", fontsize=8, color="grey", ha="right", va="bottom")
    axes.set(
        xscale="log", xlabel="measured peak memory, GiB", ylabel="held-out loss", ylim=(None, top),
        title=f"{STEPS} updates of {ROWS * LENGTH} tokens: adapters blue, weights orange",
    )  # fmt: skip
    ticks = (0.5, 1, 2, 3, 5)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.text(1.02, 1, "\n".join(names), transform=axes.transAxes, fontsize=8, va="top", family="monospace")
    figure.tight_layout()
    figure.savefig(DOCS / "images/methods.png", dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("arms", nargs="*")
    arguments = parser.parse_args()
    filed: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    runs: dict[str, Any] = filed.get("runs", {})
    for arm in arguments.arms or [arm for arm in ARMS if arm not in runs]:
        runs[arm] = measured(arm, arguments.model, arguments.data)
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
    page = DOCS / "choosing.md"
    before, rest = page.read_text().split(BEGIN)
    page.write_text(before + BEGIN + table(runs) + END + rest.split(END)[1])
    draw({arm: runs[arm] for arm in ARMS if arm in runs})


if __name__ == "__main__":
    main()
