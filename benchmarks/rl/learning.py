"""Files the curves of runs: learning.json with every update, curves.png of the rewards.

    python benchmarks/rl/learning.py NAME=RUN ...      adds runs to learning.json, and draws
    python benchmarks/rl/learning.py                   only draws

Of an update the rewards, entropy, KL divergence and length; of a validation the mean of every reward.
"""

from __future__ import annotations

import json
import pathlib
import sys

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

FOLDER = pathlib.Path(__file__).parent
METRICS = ("reward", "entropy", "kl", "kl_coef", "completions/mean_length", "reward_std")
PARTS = "rewards/"


def curves(run: pathlib.Path) -> dict[str, dict[str, object]]:
    """The metrics of a run's updates, and the rewards of its validations by update."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    updates = [line for line in lines if line["kind"] == "train"]
    names = [name for name in updates[0] if name in METRICS or (name.startswith(PARTS) and name.endswith("/mean"))]
    validations = [line for line in lines if line["kind"] == "eval"]
    return {
        "updates": {name: [round(line[name], 5) for line in updates] for name in names},
        "held_out": {
            name: {str(line["step"]): round(line[name], 5) for line in validations}
            for name in names
            if name == "reward" or name.startswith(PARTS)
        },
    }


def draw(results: dict[str, dict[str, dict[str, object]]]) -> None:
    """Draws the rewards of each run, updates as dots, validations as lines, and a KL divergence that has a target."""
    figure = Figure(figsize=(12, 3 * -(-len(results) // 4)), layout="constrained")
    axes = figure.subplots(-(-len(results) // 4), 4, squeeze=False).ravel()
    for place, (name, result) in zip(axes, results.items(), strict=False):
        parts = [part for part in result["held_out"] if part.startswith(PARTS)]
        for part in parts:
            colour = f"C{parts.index(part)}"
            values = result["updates"][part]
            place.plot(range(1, len(values) + 1), values, ".", color=colour, alpha=0.35)
            points = [(int(step), value) for step, value in result["held_out"][part].items()]
            place.plot(*zip(*points, strict=True), "o-", color=colour, label=part.split("/")[1])
        if "kl_coef" in result["updates"]:
            values = result["updates"]["kl"]
            place.plot(range(1, len(values) + 1), values, "k-", linewidth=1, label="KL a token")
        place.set_title(name)
        place.set_xlabel("updates")
        place.legend(fontsize="small")
    for place in axes[len(results) :]:
        place.remove()
    FigureCanvasAgg(figure).print_png(FOLDER / "curves.png")


if __name__ == "__main__":
    file = FOLDER / "learning.json"
    filed = json.loads(file.read_text(encoding="utf-8"))
    for argument in sys.argv[1:]:
        label, _, folder = argument.partition("=")
        filed[label] = curves(pathlib.Path(folder))
    lines = [f"{json.dumps(label)}: {json.dumps(result)}" for label, result in filed.items()]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    draw(filed)
