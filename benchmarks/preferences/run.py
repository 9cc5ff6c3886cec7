"""Preference stages on a real model and real data: reward accuracy on held-out answers while it is trained.

    python benchmarks/preferences/run.py [dpo simpo kto rm ...]

SmolLM2-135M-Instruct; DPO and SimPO on 300 pairs and KTO on 300 labelled answers of LLaMA-Factory's demo data, the
reward model on hh-rlhf's harmless transcripts. The held-out answers are never trained on. Writes result-STAGE.json and
curves.png beside itself; one stage at a time, so that a slow machine can be asked for one.
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

HERE = pathlib.Path(__file__).resolve().parent
ASSETS = HERE.parents[2] / "shared/assets/data"
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
    """Trains one stage; every evaluation's metrics and what it ran on."""
    fields = COMMON | STAGES[name] | {"model": model, "output": str(output / name), "overwrite": True}
    fields["data"] = fields["data"] | {"max_length": length}
    began = time.monotonic()
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
        "seconds": time.monotonic() - began,
        "machine": f"{platform.processor() or platform.machine()}, {platform.system()}",
        "versions": versions,
        "date": time.strftime("%Y-%m-%d"),
    }


def improved(found: dict) -> str:
    """How the held-out answers were told apart before and after: KTO's are not in pairs, so by the margin of means."""
    first, last = found["held_out"][0], found["held_out"][-1]
    if "rewards/accuracies" in last:
        return f"{found['stage']}: accuracy {first['rewards/accuracies']:.3f} -> {last['rewards/accuracies']:.3f}"
    before, after = (one["rewards/chosen"] - one["rewards/rejected"] for one in (first, last))
    return f"{found['stage']}: margin {before:.4f} -> {after:.4f}"


def draw(every: list[dict]) -> None:
    """Held-out accuracy (KTO: margin) over updates."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(every), figsize=(4 * len(every), 3.2), squeeze=False)
    for axis, found in zip(axes[0], every, strict=True):
        steps = [one["step"] for one in found["held_out"]]
        accuracy = "rewards/accuracies" in found["held_out"][-1]
        values = [
            one["rewards/accuracies"] if accuracy else one["rewards/chosen"] - one["rewards/rejected"]
            for one in found["held_out"]
        ]
        axis.plot(steps, values, marker="o")
        axis.set(title=found["stage"], xlabel="updates", ylabel="held-out " + ("accuracy" if accuracy else "margin"))
        if accuracy:
            axis.axhline(0.6, color="grey", linewidth=0.8, linestyle="--")
    figure.tight_layout()
    figure.savefig(HERE / "curves.png", dpi=120)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("stages", nargs="*", default=list(STAGES), choices=[*STAGES, []])
    asked.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    asked.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs/preferences"))
    asked.add_argument("--length", type=int, default=384, help="tokens of one answer with its prompt")
    options = asked.parse_args()
    for name in options.stages or STAGES:
        found = run(name, options.model, options.output, options.length)
        (HERE / f"result-{name}.json").write_text(json.dumps(found, indent=1) + "\n")
        print(improved(found))
    files = [HERE / f"result-{name}.json" for name in STAGES]
    if every := [json.loads(file.read_text()) for file in files if file.exists()]:
        draw(every)


if __name__ == "__main__":
    main()
