"""metrics.jsonl and samples.jsonl: one JSON object per line, appended while the run goes on.

Each line is written at once, so a killed process leaves at most one incomplete line. A resumed run truncates the files
to its checkpoint; apart from `TIMINGS` they then equal those of an uninterrupted run.
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

from meshtune.runs.output import LOGS
from meshtune.train.report.events import Evaluated, Event, Sampled, Stepped

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
TIMINGS = frozenset({"seconds", "tokens_per_second", "memory", "machine"})  # columns that differ between identical runs


class MetricsLog:
    """The sink that writes both files. A training line is written every `interval` updates."""

    def __init__(self, output: pathlib.Path, *, interval: int = 1):
        self._interval = interval
        # Append mode never overwrites existing lines, even with two writers.
        self._metrics = (output / METRICS).open("a", encoding="utf-8", buffering=1)
        self._samples = (output / SAMPLES).open("a", encoding="utf-8", buffering=1)

    def receive(self, event: Event) -> None:
        match event:
            case Stepped() if event.step % self._interval == 0:
                self._metrics.write(_line(train_row(event)))
            case Evaluated():
                self._metrics.write(_line(eval_row(event)))
            case Sampled():
                self._samples.write(_line({"step": event.step, "prompt": event.prompt, "text": event.text}))

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()


class ProcessLog:
    """The sink for device metrics of processes other than the first: logs/process-N.metrics.jsonl."""

    def __init__(self, output: pathlib.Path, process: int, *, interval: int = 1):
        self._interval = interval
        folder = output / LOGS
        folder.mkdir(exist_ok=True)
        self._file = (folder / f"process-{process}.{METRICS}").open("a", encoding="utf-8", buffering=1)

    def receive(self, event: Event) -> None:
        if isinstance(event, Stepped) and event.step % self._interval == 0:
            row = train_row(event)
            self._file.write(_line({key: row[key] for key in ("step", "seconds", "memory", "machine") if key in row}))

    def close(self) -> None:
        self._file.close()


def train_row(event: Stepped) -> dict[str, Any]:
    """Returns the JSON object of one update."""
    return {
        "kind": "train",
        "step": event.step,
        "epoch": round(event.epoch, 6),
        "loss": event.loss,
        **event.metrics,
        "grad_norm": event.grad_norm,
        "learning_rate": event.learning_rate,
        "tokens": event.tokens,
        "learned_tokens": event.learned,
        "seconds": round(event.seconds, 6),
        "tokens_per_second": round(event.tokens / event.seconds, 3) if event.seconds else None,
        "memory": event.memory,
        **({"machine": event.machine} if event.machine else {}),
    }


def eval_row(event: Evaluated) -> dict[str, Any]:
    """Returns the JSON object of one evaluation."""
    return {
        "kind": "eval",
        "step": event.step,
        "epoch": round(event.epoch, 6),
        "loss": event.loss,
        **event.metrics,
        "best": event.best,
        "seconds": round(event.seconds, 6),
    }


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the complete lines of a file, without an incomplete last one; [] if the file does not exist."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
        if not line.endswith(b"\n"):
            rows.pop()
    return rows


def cut_back(output: pathlib.Path, step: int | None) -> None:
    """Truncates both files to their lines up to update `step` (None: all lines go); replaces each file atomically."""
    for name in (METRICS, SAMPLES):
        path = output / name
        if not path.exists():
            continue
        rows = [row for row in read(path) if step is not None and row["step"] <= step]
        draft = path.with_suffix(".partial")
        draft.write_text("".join(map(_line, rows)), encoding="utf-8")
        os.replace(draft, path)


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"
