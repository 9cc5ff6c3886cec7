"""How far an export or a push is: a stage, and what of it is done, shown on a terminal and written to a file.

A program that started the command names the file in the environment variable MESHTUNE_PROGRESS. It holds one JSON
object, {"stage", "done", "total", "left"}, with "result" once there is one, and is replaced as a whole. "left" are the
seconds that the stage will still take at its speed of late, once that is known.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

VARIABLE = "MESHTUNE_PROGRESS"
SECONDS = 0.2  # between two writes of one stage
SPEED_SECONDS = 30.0  # over which the speed of a stage is measured

StageProgress = Callable[[str, int, int], None]
"""(stage, done, total). Exports have the stages reading, writing (both in bytes) and checking, a push also sending."""


def of_stage(progress: StageProgress | None, stage: str) -> Callable[[int, int], None] | None:
    """`progress` of one stage, as (done, total)."""
    return None if progress is None else functools.partial(progress, stage)


class ProgressFile:
    """Writes the progress to a file, at most every SECONDS; a disk that refuses it keeps nothing from going on."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._fields: dict[str, Any] = {}
        self._written = float("-inf")
        self._history: collections.deque[tuple[float, int]] = collections.deque()  # (time, done) of the stage

    def __call__(self, stage: str, done: int, total: int) -> None:
        is_new = stage != self._fields.get("stage")
        if is_new:
            self._history.clear()
        self._fields = {"stage": stage, "done": done, "total": total, **self._time_left(done, total)}
        if is_new or done >= total or time.monotonic() - self._written > SECONDS:
            self._write()

    def _time_left(self, done: int, total: int) -> dict[str, float]:
        now, history = time.monotonic(), self._history
        if not history or now - history[-1][0] > SECONDS:
            history.append((now, done))
        while len(history) > 2 and now - history[1][0] > SPEED_SECONDS:
            history.popleft()
        started, before = history[0]
        if done <= before or now - started < SECONDS:
            return {}
        return {"left": round((now - started) / (done - before) * (total - done), 1)}

    def finish(self, result: str) -> None:
        """Adds where the result lies: a path, or an address."""
        self._fields |= {"result": result}
        self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        scratch = self._path.with_name(f".{self._path.name}.partial")
        with contextlib.suppress(OSError):
            scratch.write_text(json.dumps(self._fields), encoding="utf-8")
            scratch.replace(self._path)


def progress_file() -> ProgressFile | None:
    """The file that VARIABLE names; None where it names none."""
    path = os.environ.get(VARIABLE)
    return ProgressFile(pathlib.Path(path)) if path else None


@contextlib.contextmanager
def shown_progress() -> Iterator[tuple[StageProgress, Callable[[str], None]]]:
    """Gives (progress, finish) of a command: they show a bar on a terminal, and write the file that VARIABLE names."""
    file = progress_file()
    with _terminal_bar() as bar:

        def progress(stage: str, done: int, total: int) -> None:
            bar(stage, done, total)
            if file is not None:
                file(stage, done, total)

        yield progress, file.finish if file is not None else lambda result: None


@contextlib.contextmanager
def _terminal_bar() -> Iterator[StageProgress]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda stage, done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        tasks = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield show
