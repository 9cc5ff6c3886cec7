"""metrics.jsonl and samples.jsonl: one JSON object per line, appended during the run.

Each line is written at once, so a killed process leaves at most one incomplete line. Each ends with the CRC-32 of the
rest of it, so that a resumed run finds damaged lines. A resumed run truncates the files to its
checkpoint; apart from `TIMINGS` they then equal those of an uninterrupted run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import zlib
from collections.abc import Mapping
from typing import Any

from meshtune.runs.output import LOGS
from meshtune.train.report.events import Evaluated, Event, Sampled, Stepped

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
CHECKSUM = "crc32"
# Columns that differ between identical runs.
TIMINGS = frozenset({"seconds", "tokens_per_second", "memory", "machine", CHECKSUM})
LAST_COLUMNS = frozenset({"memory", "machine", "seconds", "text"})  # of lines of versions that wrote no checksums
_CHECKED = re.compile(rb'(.*), "crc32": ([0-9]{1,10})\}\n', re.DOTALL)


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


def train_row(event: Stepped) -> dict[str, object]:
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


def eval_row(event: Evaluated) -> dict[str, object]:
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
    """Reads the undamaged lines of a file, without checksums; [] if the file does not exist."""
    return [line.row for line in _read_lines(path)[0]]


def cut_back(output: pathlib.Path, step: int | None, *, interval: int = 1) -> list[str]:
    """Truncates both files to their lines up to update `step` (None: all lines go); replaces each file atomically.

    Returns messages about lines that are damaged, which are removed, and lines that are missing. `interval` is that of
    MetricsLog.
    """
    notes = []
    for name in (METRICS, SAMPLES):
        path = output / name
        if not path.exists():
            notes += [f"{name} is missing: what it held of earlier updates is lost"] if step else []
            continue
        lines, damaged = _read_lines(path)
        current = [line for line in lines if step is not None and line.row["step"] <= step]
        if damaged and step is not None:
            notes.append(f"{name} is damaged: {damaged} of its lines are not what was written, and are left out")
        elif step and name == METRICS and (last := _last_update(current)) + interval <= step:
            notes.append(f"{name} is damaged: it ends at update {last}, and the checkpoint is of update {step}")
        draft = path.with_suffix(".partial")
        draft.write_bytes(b"".join(line.content for line in current))
        os.replace(draft, path)
    return notes


@dataclasses.dataclass(frozen=True)
class _Line:
    """A line of the file, and its JSON object without the checksum."""

    content: bytes
    row: dict[str, Any]


def _read_lines(path: pathlib.Path) -> tuple[list[_Line], int]:
    """The undamaged lines of a file, and the number of damaged ones. An incomplete last line is none of either."""
    if not path.exists():
        return [], 0
    contents = path.read_bytes().split(b"\n")[:-1]
    rows = [(content + b"\n", parse_line(content + b"\n")) for content in contents]
    lines = [_Line(content, row) for content, row in rows if row is not None]
    return lines, len(rows) - len(lines)


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line with its end, without its checksum; None if the line is damaged."""
    checked = _CHECKED.fullmatch(line)
    if checked and zlib.crc32(checked[1]) != int(checked[2]):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if checked:
        return {key: value for key, value in row.items() if key != CHECKSUM} if isinstance(row, dict) else None
    return row if isinstance(row, dict) and row and list(row)[-1] in LAST_COLUMNS else None


def _last_update(lines: list[_Line]) -> int:
    return max((line.row["step"] for line in lines if line.row.get("kind") == "train"), default=0)


def _line(row: Mapping[str, object]) -> str:
    content = json.dumps(row, ensure_ascii=False)[:-1]
    return f'{content}, "{CHECKSUM}": {zlib.crc32(content.encode())}}}\n'
