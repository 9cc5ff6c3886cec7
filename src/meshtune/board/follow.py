"""Reads the files of a run as they grow."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from meshtune.board.job import read_json
from meshtune.errors import UserError
from meshtune.runs.output import CHECKPOINTS, RECIPE, RUN
from meshtune.train.report.metrics_log import METRICS, parse_line

START = "0-0"
TAIL = 1 << 16  # bytes of a log that a new reader begins with
CHUNK = 1 << 18  # bytes that one reading returns at most
_CURSOR = re.compile(r"(\d{1,20})-(\d{1,15})")


@dataclasses.dataclass(frozen=True)
class News:
    """New content of a file. `reset`: the file is another, or shorter, so that what came before is void.

    `skipped` bytes were passed over. `cursor` is where the next reading begins.
    """

    content: bytes
    cursor: str
    reset: bool = False
    skipped: int = 0


def read_lines(path: pathlib.Path, cursor: str = START, *, limit: int = CHUNK) -> News:
    """Whole lines after `cursor`, up to some `limit` bytes, but at least one line."""
    news = _read(path, cursor, limit)
    if len(news.content) == limit and b"\n" not in news.content:  # a line that is longer than the limit
        news = _read(path, cursor, 64 * limit)
    end = news.content.rfind(b"\n") + 1
    return _shorten(news, end)


def read_text(path: pathlib.Path, cursor: str = START, *, limit: int = CHUNK, behind: int | None = None) -> News:
    """Bytes after `cursor`, cut between characters. A reader that is more than `behind` bytes behind is brought to the
    last of them, from the beginning of a line."""
    news = _read(path, cursor, limit, behind)
    end = len(news.content)
    for back in range(1, min(4, end) + 1):  # a character of UTF-8 whose end is not written yet
        byte = news.content[end - back]
        if byte >= 0xC0:
            if back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4):
                end -= back
            break
        if byte < 0x80:
            break
    return _shorten(news, end)


def _read(path: pathlib.Path, cursor: str, limit: int, behind: int | None = None) -> News:
    match = _CURSOR.fullmatch(cursor)
    inode, offset = (int(match[1]), int(match[2])) if match else (0, 0)
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            reset = bool(inode) and (status.st_ino != inode or status.st_size < offset)
            offset = 0 if reset else offset
            skipped = 0
            if behind is not None and status.st_size - offset > max(behind, limit):
                skipped = status.st_size - behind - offset
                file.seek(offset + skipped)
                skipped += len(file.readline(behind))
            file.seek(offset + skipped)
            content = file.read(limit)
            return News(content, f"{status.st_ino}-{offset + skipped + len(content)}", reset, skipped)
    except OSError:  # not there yet, or no longer
        return News(b"", START, bool(inode))


def _shorten(news: News, end: int) -> News:
    inode, _, offset = news.cursor.partition("-")
    cursor = f"{inode}-{int(offset) - (len(news.content) - end)}"
    return dataclasses.replace(news, content=news.content[:end], cursor=cursor)


def log_end(path: pathlib.Path, *, lines: int = 12) -> str:
    """The last output of a command that failed: from its last `error:` on, or else its last lines."""
    try:
        size, inode = path.stat().st_size, path.stat().st_ino
    except OSError:
        return ""
    news = _read(path, f"{inode}-{max(0, size - (1 << 13))}", 1 << 13)
    text = news.content.decode("utf-8", "replace").rstrip()
    start = text.rfind("\nerror:")
    return text[start + 1 :] if start >= 0 else "\n".join(text.splitlines()[-lines:])


MAX_DEPTH = 100  # of values in the files of a run
LAST_UPDATE_BYTES = 1 << 13  # bytes in which the last update is looked for


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
    rows, _ = rows_of(read_lines(path, f"{inode}-{max(0, size - LAST_UPDATE_BYTES)}"))
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
