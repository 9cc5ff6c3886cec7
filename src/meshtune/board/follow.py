"""Files that grow, read from where a reader left off. A cursor is "inode-offset": a file that was replaced is seen."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re

START = "0-0"
TAIL = 1 << 16  # bytes of a log that a new reader begins with
CHUNK = 1 << 18  # bytes that one reading returns at most
_CURSOR = re.compile(r"(\d{1,20})-(\d{1,15})")


@dataclasses.dataclass(frozen=True)
class News:
    """What was appended since. `reset`: the file is another, or shorter, so that what came before is void.

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
    return _shortened(news, end)


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
    return _shortened(news, end)


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


def _shortened(news: News, end: int) -> News:
    inode, _, offset = news.cursor.partition("-")
    cursor = f"{inode}-{int(offset) - (len(news.content) - end)}"
    return dataclasses.replace(news, content=news.content[:end], cursor=cursor)


def log_end(path: pathlib.Path, *, lines: int = 12) -> str:
    """What a command that failed said last: from its last `error:` on, or else its last lines."""
    try:
        size, inode = path.stat().st_size, path.stat().st_ino
    except OSError:
        return ""
    news = _read(path, f"{inode}-{max(0, size - (1 << 13))}", 1 << 13)
    text = news.content.decode("utf-8", "replace").rstrip()
    start = text.rfind("\nerror:")
    return text[start + 1 :] if start >= 0 else "\n".join(text.splitlines()[-lines:])
