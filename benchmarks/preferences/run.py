"""Trains preference stages on a real model and real data, and measures rewards of held-out answers on the way.

    python benchmarks/preferences/run.py [dpo simpo kto rm ...]
    python benchmarks/preferences/run.py --draw                      only redraw curves.png from the filed results

SmolLM2-135M-Instruct; DPO and SimPO on 300 pairs and KTO on 300 labelled answers of LLaMA-Factory's demo data, the
reward model on hh-rlhf's harmless transcripts. Held-out answers are never trained on. Writes result-STAGE.json and
curves.png beside itself; stages can be run one at a time on a slow machine.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import pathlib
import platform
import time

from meshtune.config.load import load_recipe
from meshtune.train.run import train

FOLDER = pathlib.Path(__file__).resolve().parent
ASSETS = FOLDER.parents[2] / "shared/assets/data"
COMMON = {
    "method": {"kind": "lora", "rank": 16, "alpha": 32},
    "train": {"batch_size": 4, "epochs": 1},
    "optimizer": {"learning_rate": 2e-4, "schedule": "linear", "warmup_ratio": 0.1},
    "eval": {"every": 15, "at_start": True},
    "checkpoint": {"keep_best": False, "keep": 1},
    "log": {"every": 1},
}
PAIRS = {"registry": str(ASSETS / "llamafactory"), "train": [{"name": "dpo_en_demo"}], "validation": 60}
LABELLED = {"registry": str(ASSETS / "llamafactory"), "train": [{"name": "kto_en_demo"}], "validation": 60}
HH = {"train": [{"path": str(ASSETS / "hh-rlhf/harmless-base-test.jsonl.gz")}], "validation": 300}
TITLES = {"dpo": "DPO", "simpo": "SimPO", "kto": "KTO", "rm": "reward model"}
INK, GRID = "#1f2933", "#e4e7eb"
TRAINING = {"marker": ".", "linestyle": "", "color": "#9fb8e8", "markersize": 6, "label": "training, every update"}
HELD_OUT = {"marker": "o", "color": "#d9480f", "linewidth": 2, "markersize": 7, "label": "held-out answers"}
STAGES = {
    "dpo": {"stage": {"kind": "dpo", "beta": 0.1}, "data": PAIRS},
    "simpo": {"stage": {"kind": "simpo"}, "data": PAIRS},
    "kto": {"stage": {"kind": "kto", "beta": 0.1}, "data": LABELLED},
    "rm": {
        "stage": {"kind": "rm", "centre": 0.01},
        "data": HH | {"on_bad": "skip"},
        "optimizer": {**COMMON["optimizer"], "learning_rate": 4e-4},
        "train": {**COMMON["train"], "batch_size": 16},
        "eval": {"every": 40, "at_start": True},
    },
}


def run(name: str, model: str, output: pathlib.Path, length: int) -> dict:
    """Trains one stage; returns the metrics of all updates and evaluations, and the machine and versions."""
    fields = COMMON | STAGES[name] | {"model": model, "output": str(output / name), "overwrite": True}
    fields["data"] = fields["data"] | {"max_length": length}
    start = time.monotonic()
    file = output / f"{name}.json"
    output.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(fields, indent=2))
    result = train(load_recipe(str(file), []))
    lines = [json.loads(line) for line in (output / name / "metrics.jsonl").read_text().splitlines()]
    versions = {package: importlib.metadata.version(package) for package in ("meshtune", "jax", "numpy")}
    return {
        "stage": name,
        "command": f"python benchmarks/preferences/run.py {name} --length {length}",
        "recipe": json.loads(json.dumps(fields).replace(str(ASSETS), "DATA").replace(model, pathlib.Path(model).name)),
        "held_out": [line for line in lines if line["kind"] == "eval"],
        "training": [line for line in lines if line["kind"] == "train"],
        "updates": result.steps,
        "seconds": time.monotonic() - start,
        "machine": f"{platform.processor() or platform.machine()}, {platform.system()}",
        "versions": versions,
        "date": time.strftime("%Y-%m-%d"),
    }


def margin(line: dict) -> float | None:
    """The reward of preferred answers over that of the others; None for a batch that has only one of the two."""
    if "rewards/chosen" not in line or "rewards/rejected" not in line:
        return None
    return line["rewards/chosen"] - line["rewards/rejected"]


def summary(result: dict) -> str:
    """Accuracy on held-out pairs before and after; for KTO, whose answers are not pairs, the margin of mean rewards."""
    first, last = result["held_out"][0], result["held_out"][-1]
    if "rewards/accuracies" in last:
        return f"{result['stage']}: accuracy {first['rewards/accuracies']:.3f} -> {last['rewards/accuracies']:.3f}"
    return f"{result['stage']}: margin {margin(first):.4f} -> {margin(last):.4f}"


def draw(results: list[dict]) -> None:
    """A column per stage: the loss (top) and the reward margin (bottom) of every update and of the held-out answers."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.4 * len(results), 6.2), dpi=120, layout="constrained", facecolor="white")
    axes = figure.subplots(2, len(results), sharex="col", squeeze=False)
    for column, result in enumerate(results):
        last = result["held_out"][-1]
        accuracy = f", {100 * last['rewards/accuracies']:.0f}% right" if "rewards/accuracies" in last else ""
        axes[0, column].set_title(f"{TITLES[result['stage']]}{accuracy}", loc="left", fontsize=12, color=INK)
        for row, value in enumerate((lambda line: line["loss"], margin)):
            for lines, style in ((result["training"], TRAINING), (result["held_out"], HELD_OUT)):
                points = [(line["step"], value(line)) for line in lines]
                points = [point for point in points if point[1] is not None]
                axes[row, column].plot(*zip(*points, strict=True), **style)
            axes[row, column].annotate(f"{value(last):.3g}", (last["step"], value(last)), xytext=(0, 9),
                                       textcoords="offset points", ha="right", fontsize=10, color=INK)  # fmt: skip
        axes[1, column].axhline(0, color=INK, linewidth=0.8)
        axes[1, column].set_xlabel("updates", fontsize=10.5, color=INK)
    axes[0, 0].set_ylabel("loss", fontsize=11, color=INK)
    axes[1, 0].set_ylabel("reward margin, chosen - rejected", fontsize=11, color=INK)
    for panel in axes.flat:
        panel.grid(axis="y", color=GRID, linewidth=0.8)
        panel.tick_params(colors=INK, labelsize=10, length=0)
        panel.spines[["top", "right", "left"]].set_visible(False)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=11)
    FigureCanvasAgg(figure).print_png(FOLDER / "curves.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="dpo, simpo, kto or rm; default: all")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs/preferences"))
    parser.add_argument("--length", type=int, default=384, help="tokens of one answer with its prompt")
    parser.add_argument("--draw", action="store_true", help="train nothing, only redraw curves.png")
    options = parser.parse_args()
    for name in [] if options.draw else options.stages or STAGES:
        result = run(name, options.model, options.output, options.length)
        (FOLDER / f"result-{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        print(summary(result))
    files = [FOLDER / f"result-{name}.json" for name in STAGES]
    if results := [json.loads(file.read_text()) for file in files if file.exists()]:
        draw(results)


if __name__ == "__main__":
    main()
