"""What a run has written so far, as JSON that any browser reads: metrics, samples, run.json, checkpoints."""

from __future__ import annotations

import contextlib
import math
import pathlib
from collections.abc import Iterator
from typing import Any

from meshtune.board.follow import START, News, read_lines
from meshtune.board.job import read_json
from meshtune.errors import UserError
from meshtune.runs.output import CHECKPOINTS, RECIPE, RUN
from meshtune.train.report.metrics_log import METRICS, parse_line

MAX_DEPTH = 100  # of values in the files of a run
TAIL = 1 << 13  # bytes in which the last update is looked for


def rows_of(news: News) -> tuple[list[dict[str, Any]], int]:
    """The rows of a piece of metrics.jsonl or samples.jsonl, and the number of broken lines, which are left out."""
    lines = news.content.splitlines(keepends=True)
    rows = [row for line in lines if (row := parse_line(line)) is not None]
    return [{key: plain(value) for key, value in row.items()} for row in rows], len(lines) - len(rows)


def plain(value: Any, depth: int = 0) -> Any:
    """A value without what browsers do not read: NaN, infinities and what is nested deeper than MAX_DEPTH are null."""
    if depth > MAX_DEPTH or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if isinstance(value, dict):
        return {key: plain(inner, depth + 1) for key, inner in value.items()}
    return [plain(inner, depth + 1) for inner in value] if isinstance(value, list) else value


def all_rows(output: pathlib.Path, name: str, cursor: str = START) -> dict[str, Any]:
    """Rows after `cursor`: {rows, broken, cursor, reset}."""
    rows: list[dict[str, Any]] = []
    broken, reset = 0, False
    while True:
        news = read_lines(output / name, cursor)
        new, damaged = rows_of(news)
        rows, broken = [] if news.reset else rows, broken + damaged
        rows, reset, cursor = rows + new, reset or news.reset, news.cursor
        if not news.content:
            return {"rows": rows, "broken": broken, "cursor": cursor, "reset": reset}


def last_update(output: pathlib.Path) -> dict[str, Any]:
    """The newest training row; {} before the first."""
    path = output / METRICS
    try:
        size, inode = path.stat().st_size, path.stat().st_ino
    except OSError:
        return {}
    rows, _ = rows_of(read_lines(path, f"{inode}-{max(0, size - TAIL)}"))
    return next((row for row in reversed(rows) if row.get("kind") == "train"), {})


@contextlib.contextmanager
def reading_run(output: pathlib.Path) -> Iterator[None]:
    """Raises UserError where the files of a run hold other kinds of values than a run writes, as a stranger's may."""
    try:
        yield
    except UserError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise UserError(
            f"its files hold what no run writes ({type(error).__name__}: {str(error)[:200]})",
            where=str(output),
            fix="look at run.json and metrics.jsonl",
        ) from error


def is_number(value: object) -> bool:
    """Whether a value is a number, which true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def checkpoints(output: pathlib.Path) -> list[int]:
    """Updates of which there is a whole checkpoint."""
    try:
        names = [path.name for path in (output / CHECKPOINTS).iterdir()]
    except OSError:
        return []
    return sorted(int(name) for name in names if name.isdigit())


def run_json(output: pathlib.Path) -> dict[str, Any]:
    """run.json as it is; {} where there is none or it is broken."""
    return plain(read_json(output / RUN))


def is_run(folder: pathlib.Path) -> bool:
    """Whether a folder is that of a run."""
    return (folder / RUN).is_file() or ((folder / RECIPE).is_file() and (folder / METRICS).is_file())
