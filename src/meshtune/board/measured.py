"""What an evaluation or a prediction has measured: figures of each model, and its first answers side by side."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

from meshtune.board.follow import read_lines
from meshtune.board.job import read_json
from meshtune.board.records import is_number, plain
from meshtune.evaluate.folder import PREDICTIONS, TASKS, TOTALS

MOST_ROWS = 50
# An evaluation's folders of one model each, what was there before tuning first; a prediction has no such folder.
MODELS = ("base", "before", "model", "tuned", "after")


def read_figures(output: pathlib.Path) -> dict[str, Any]:
    """`models` as [{"name", "figures": {METRIC: number}}], and `rows` as [{"prompt", "reference", "answers"}] with an
    answer of each model, None where it has none yet. Empty where nothing was measured."""
    folders = {name: output / name for name in MODELS if (output / name).is_dir()} or {"": output}
    figures = {name: _figures(folder) for name, folder in folders.items()}
    answers = {name: list(_predictions(folder / PREDICTIONS)) for name, folder in folders.items()}
    named = [name for name in folders if figures[name] or answers[name]]
    longest = max((answers[name] for name in named), key=len, default=[])
    rows = [
        {
            "prompt": row.get("prompt"),
            "reference": row.get("reference"),
            "answers": [answers[name][number].get("answer") if number < len(answers[name]) else None for name in named],
        }
        for number, row in enumerate(longest)
    ]
    return {"models": [{"name": name, "figures": figures[name]} for name in named], "rows": rows}


def _figures(folder: pathlib.Path) -> dict[str, float]:
    """The numbers of a model's records by metric, and of its tasks by task and metric."""
    totals = plain(read_json(folder / TOTALS))
    figures = {name: value for name, value in totals.items() if is_number(value)}
    tasks = read_json(folder / TASKS).get("tasks")
    for task in tasks if isinstance(tasks, list) else []:
        if not isinstance(task, dict) or not isinstance(metrics := plain(task.get("metrics")), dict):
            continue
        figures |= {
            f"{task.get('name')} {name.removesuffix(',none')}": v for name, v in metrics.items() if is_number(v)
        }
    return figures


def _predictions(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """The first MOST_ROWS answers; broken lines are left out."""
    for line in read_lines(path).content.splitlines()[:MOST_ROWS]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            yield plain(row)
