"""The folder of an evaluation: what it holds, and the progress written there."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from meshtune import json_text
from meshtune.digests import DamagedError
from meshtune.errors import UserError
from meshtune.options import Shard
from meshtune.runs.output import LOGS, claim_output
from meshtune.runs.progress import progress_file

Result = TypeVar("Result")
SETTINGS = "settings.json"
PREDICTIONS, TOTALS, TASKS = "predictions.jsonl", "metrics.json", "tasks.json"
MARKDOWN, HTML = "report.md", "report.html"


@contextlib.contextmanager
def results_folder(
    folder: pathlib.Path, settings: Mapping[str, Any], *, resume: bool, overwrite: bool, shard: Shard = Shard()
) -> Iterator[pathlib.Path | None]:
    """Holds `folder`, or a shard of it, for this process and writes `settings`; yields where earlier results were moved
    to, or None. The processes of the shards of one evaluation share the folder, each going on with what is there.

    Raises UserError for a folder with other results, unless `overwrite` moves them aside or `resume` continues with
    them; and for resuming with other settings, which it names.
    """
    settings = json.loads(json.dumps(settings))
    if overwrite and shard.count > 1:
        raise UserError(
            "a shard cannot move the folder aside, which other shards write to",
            where="--overwrite",
            fix="give another --output, or move the folder away yourself",
        )
    if check_folder(folder, resume=resume or shard.count > 1, overwrite=overwrite):
        _check_same(folder, settings)
    with claim_output(folder, overwrite=overwrite, shard=shard) as aside:
        write_json(folder / SETTINGS, settings)
        yield aside


def check_folder(folder: pathlib.Path, *, resume: bool, overwrite: bool) -> bool:
    """Whether `folder` has results to go on with. Raises UserError for a folder with results without `overwrite` or
    `resume`."""
    if folder.exists() and not folder.is_dir():
        raise UserError("the output is a file, and must be a directory", where=str(folder), fix="give another output")
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    names = [name for name in names if name != LOGS and not name.startswith(".")]
    if names and not overwrite and not resume:
        raise UserError(
            f"the folder is not empty: it holds {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}",
            where=str(folder),
            fix="--resume continues them, --overwrite moves them aside; or give another output",
        )
    return bool(names) and not overwrite


def join_complete(
    folder: pathlib.Path,
    shard: Shard,
    missing: Callable[[], Sequence[object]],
    join: Callable[[], Result],
    console: Console,
) -> Result | None:
    """Joins the parts of an evaluation in the process that finds none `missing`; None in all others."""
    if shard.count == 1:
        return join()
    with contextlib.ExitStack() as stack:
        if parts := missing():
            console.print(f"shard {shard} is complete; parts of others to wait for: {len(parts):,}")
            return None
        try:
            stack.enter_context(claim_output(folder, overwrite=False))
        except UserError:  # another process joins them
            return None
        return None if missing() else join()  # none are left where another has joined them meanwhile


def _check_same(folder: pathlib.Path, settings: Mapping[str, Any]) -> None:
    file = folder / SETTINGS
    if not file.is_file():
        raise UserError(
            f"there is nothing to resume: the folder holds no {SETTINGS}",
            where=str(folder),
            fix="give the output of an earlier run, or an empty or new folder",
        )
    before = read_json(file)
    for name in dict.fromkeys([*before, *settings]):
        if before.get(name) != settings.get(name):
            raise UserError(
                f"these results have another {name}: {before.get(name)!r}, not {settings.get(name)!r}",
                where=str(file),
                fix="give the same as before, or another output; --overwrite moves these results aside",
            )


def write_json(path: pathlib.Path, value: object) -> None:
    """Writes a JSON file as one atomic replacement."""
    replace(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_lines(path: pathlib.Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes a file of JSON lines as one atomic replacement."""
    replace(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def replace(path: pathlib.Path, text: str) -> None:
    """Writes a text file as one atomic replacement."""
    draft = path.with_name(f".{path.name}.{os.uname().nodename}-{os.getpid()}.partial")  # shards write the same files
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A file that `write_json` wrote. Raises DamagedError."""
    try:
        return json_text.read_json(path)
    except UserError as problem:
        raise DamagedError(
            f"{path.name} cannot be read: {problem.what}", where=str(path), fix="--overwrite"
        ) from problem


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines; none if it does not exist. A last line that was cut off is left out."""
    if not path.is_file():
        return []
    rows = []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines):
        try:
            if line:
                rows.append(json.loads(line))
        except (ValueError, RecursionError) as problem:
            if number < len(lines) - 1:
                raise DamagedError(
                    "a line is not JSON", where=f"{path}, line {number + 1}", fix="remove the line, and resume"
                ) from problem
    return rows


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
