"""The attempts of a run: how much of its time went into updates that it has kept, over all its starts."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from meshtune.runs.output import write_run
from meshtune.train.report.events import Event, Saved, Started, Stepped, Stopped
from meshtune.train.report.metrics_log import format_line, read

ATTEMPTS = "attempts.jsonl"


@dataclasses.dataclass(frozen=True)
class Goodput:
    """Of `wall_seconds` since the first start, those between attempts included, `useful_seconds` were spent in updates
    that are part of the run's result. `attempts` counts its starts."""

    useful_seconds: float
    wall_seconds: float
    attempts: int

    @property
    def share(self) -> float:
        """Useful time over all time."""
        return min(1.0, self.useful_seconds / self.wall_seconds) if self.wall_seconds > 0 else 0.0

    def to_json(self) -> dict[str, object]:
        """The form in run.json."""
        return {"goodput": round(self.share, 6), **dataclasses.asdict(self)}

    def __str__(self) -> str:
        minutes = self.wall_seconds / 60
        return f"{100 * self.share:.0f}% of {minutes:,.1f} min were updates that count, in {self.attempts} attempts"


class AttemptsLog:
    """The sink that writes a line when an attempt starts, saves and stops, and the run's goodput to run.json.

    `started` is when this attempt began, by `time.time`. A line is written at once, so that killed attempts count.
    """

    def __init__(self, output: pathlib.Path, started: float):
        self._output, self._started, self._useful = output, started, 0.0
        path = output / ATTEMPTS
        cut = path.exists() and not path.read_bytes().endswith(b"\n")  # a line that a killed process has not finished
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._file.write("\n" * cut)

    def receive(self, event: Event) -> None:
        """Notes updates, and writes what an attempt has kept."""
        match event:
            case Started():
                self._write("start", event.done, started=round(self._started, 3))
            case Stepped():
                self._useful += event.seconds + event.rollout_seconds
            case Saved() | Stopped():
                self._write("save" if isinstance(event, Saved) else "stop", event.step, useful=round(self._useful, 3))
                write_run(self._output, {"goodput": read_goodput(self._output).to_json()})

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, kind: str, step: int, **fields: float) -> None:
        self._file.write(format_line({"kind": kind, "step": step, "time": round(time.time(), 3), **fields}))


def read_goodput(output: pathlib.Path) -> Goodput:
    """The goodput of a run's attempts so far."""
    return goodput_of(read(output / ATTEMPTS))


def goodput_of(rows: Sequence[Mapping[str, Any]]) -> Goodput:
    """The goodput by the lines of AttemptsLog. An attempt's updates count up to the save that the next began from.

    Attempts on hosts whose clocks differ are as long as they were; only the time between them can be wrong.
    """
    useful_at = {0: 0.0}  # useful seconds up to each save
    before = 0.0
    attempts, wall, last = 0, 0.0, None
    for row in rows:
        since = row["started"] if last is None else last
        if row["kind"] == "start":  # its clock may be behind
            wall, since = wall + max(0.0, row["started"] - since), row["started"]
        wall, last = wall + max(0.0, row["time"] - since), row["time"]
        if row["kind"] == "start":
            attempts += 1
            useful_at = {step: seconds for step, seconds in useful_at.items() if step <= row["step"]}
            before = useful_at[max(useful_at)]
        else:
            useful_at[row["step"]] = before + row["useful"]
    return Goodput(useful_at[max(useful_at)], wall, attempts)
