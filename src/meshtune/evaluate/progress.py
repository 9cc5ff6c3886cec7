"""How far an evaluation is, with the time that is left: a bar on terminals, a line now and then elsewhere, and the file
of runs.progress for a program that asks for it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from meshtune.runs.progress import progress_file

LINE_SECONDS = 15.0  # between lines without a terminal

Report = Callable[[int, int], None]
"""(done, total)"""


@contextlib.contextmanager
def show_progress(console: Console, activity: str) -> Iterator[Report]:
    """Shows the progress reported to the yielded function, until the context ends."""
    if not console.is_terminal:
        lines, file = _Lines(console, activity), progress_file()

        def report(done: int, total: int) -> None:
            lines(done, total)
            if file is not None:
                file(activity, done, total)

        yield report
        return
    columns = (TaskProgressColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), BarColumn(), *columns, console=console) as progress:
        task = progress.add_task(activity, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


class _Lines:
    """Prints a line every LINE_SECONDS."""

    def __init__(self, console: Console, activity: str):
        self._console, self._activity = console, activity
        self._started = self._printed = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._printed < LINE_SECONDS or not done:
            return
        self._printed = now
        left = (now - self._started) / done * (total - done)
        self._console.print(f"{self._activity}: {done / total:.0%}, {left:,.0f} s left", soft_wrap=True)
