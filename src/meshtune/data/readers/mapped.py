"""Memory-mapped files: the operating system pages them in and out, so 100 GB take no memory of the process."""

from __future__ import annotations

import errno
import gzip
import mmap
import pathlib
import shlex
import tempfile
import zlib

import numpy as np

from meshtune.errors import UserError

CHUNK = 1 << 24  # bytes scanned at a time, which bounds the memory of a scan
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
UNPACKED, RATIO = 1 << 26, 100  # bytes, and times its size, that a .gz file may hold: text is packed to a tenth
MAX_RECORD = 1 << 28  # bytes of a record
CONTEXT = 30  # characters shown on either side of a mistake


class MappedFile:
    """The bytes of `path` as `view`; `name` is what the user called the file.

    A .gz file is decompressed once into a temporary file without a name (in TMPDIR), since records are read in any
    order. `start` is the offset of the first byte after a UTF-8 byte order mark. Raises UserError for a file that is
    unreadable, empty or UTF-16, and for a damaged .gz.
    """

    def __init__(self, path: pathlib.Path, name: str):
        self.path, self.name = path, name
        self._status = file_status(path)
        self.view = _map(path, name)
        self.start = 3 if self.view[:3] == b"\xef\xbb\xbf" else 0
        if self.view[:2] in (b"\xff\xfe", b"\xfe\xff"):
            fix = f"iconv -f UTF-16 -t UTF-8 {path} > new file"
            raise UserError("the file is UTF-16, not UTF-8", where=name, fix=fix)

    def __reduce__(self):
        return MappedFile, (self.path, self.name)

    def check_unchanged(self) -> None:
        """Raises UserError if the file was written to since it was opened. One put in its place changes nothing here,
        since the former contents remain mapped."""
        if self.path.suffix != ".gz":
            check_same_file(self.path, self._status, self.name)

    def line(self, offset: int) -> int:
        """The line, counted from 1, that contains the byte at `offset`."""
        return 1 + sum(
            int((np.frombuffer(self.view, np.uint8, min(CHUNK, offset - begin), begin) == 10).sum())
            for begin in range(0, offset, CHUNK)
        )

    def position(self, offset: int) -> str:
        """`line 3, column 14`, where columns count characters from 1."""
        line_begin = self.view.rfind(b"\n", 0, offset) + 1 or self.start
        column = len(self.view[line_begin:offset].decode("utf-8", "replace")) + 1
        return f"line {self.line(offset)}, column {column}"

    def excerpt(self, offset: int) -> str:
        """The text on both sides of `offset`, which is marked by ▸."""
        left = self.view[max(self.start, offset - 4 * CONTEXT) : offset].decode("utf-8", "replace")[-CONTEXT:]
        right = self.view[offset : offset + 4 * CONTEXT].decode("utf-8", "replace")[:CONTEXT]
        return f"{left}▸{right}".replace("\r", "").replace("\n", "⏎")

    def text(self, begin: int, end: int) -> str:
        """Decodes the bytes from `begin` to `end`. Raises UserError with the position where they are not UTF-8, and for
        more than MAX_RECORD."""
        if end - begin > MAX_RECORD:
            problem = f"the record has {end - begin:,} bytes, and at most {MAX_RECORD:,} are read"
            raise UserError(problem, where=f"{self.name}, line {self.line(begin)}", fix="split it into several records")
        try:
            return self.view[begin:end].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._encoding_error(begin + error.start) from None

    def _encoding_error(self, offset: int) -> UserError:
        problem = f"the text is not valid UTF-8: byte 0x{self.view[offset]:02x}"
        return UserError(problem, where=f"{self.name}, {self.position(offset)}", fix="save the file as UTF-8")


def file_status(path: pathlib.Path) -> tuple[int, int, int]:
    """The inode, size and time of the last change of a file; zeros if there is none."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0, 0
    return status.st_ino, status.st_size, status.st_mtime_ns


def check_same_file(path: pathlib.Path, before: tuple[int, int, int] | None, name: str) -> None:
    """Raises UserError if the file was written to since `before`, its status then. One put in its place changes
    nothing, where the former contents remain mapped."""
    status = file_status(path)
    if before is not None and status[0] == before[0] and status != before:
        fix = "start again once nothing writes to it any more"
        raise UserError("the file was changed while it was read", where=name, fix=fix)


def _map(path: pathlib.Path, name: str) -> mmap.mmap:
    try:
        if path.suffix == ".gz":
            return _map_unpacked(path, name)
        with path.open("rb") as file:
            return _view(file.fileno(), path.stat().st_size, name)
    except (gzip.BadGzipFile, EOFError, zlib.error, OSError) as error:
        raise _unreadable_error(error, path, name) from None


def _map_unpacked(path: pathlib.Path, name: str) -> mmap.mmap:
    with gzip.open(path) as compressed, tempfile.TemporaryFile() as plain:
        limit = unpacked_limit(path)
        while chunk := compressed.read(CHUNK):
            if plain.tell() + len(chunk) > limit:
                raise unpacked_error(path, name, limit, f"unpack it yourself: gunzip {shlex.quote(str(path))}")
            plain.write(chunk)
        plain.flush()
        return _view(plain.fileno(), plain.tell(), name)


def _unreadable_error(error: Exception, path: pathlib.Path, name: str) -> UserError:
    if not isinstance(error, OSError) or isinstance(error, gzip.BadGzipFile):
        return UserError(f"the gzip file is damaged or truncated ({error})", where=name, fix="download it again")
    if error.errno in DISK_FULL and path.suffix == ".gz":
        return UserError(
            f"the file cannot be unpacked: {error.strerror}",
            where=f"{name}, {tempfile.gettempdir()}",
            fix="free space there, or set TMPDIR to a directory with more",
        )
    return UserError(f"cannot read the file: {error.strerror or error}", where=name)


def unpacked_limit(path: pathlib.Path) -> int:
    """The bytes that a compressed file may hold."""
    return UNPACKED + RATIO * path.stat().st_size


def unpacked_error(path: pathlib.Path, name: str, limit: int, fix: str) -> UserError:
    """The error for a compressed file that holds more than its `limit`."""
    problem = f"the file has {path.stat().st_size:,} bytes and holds more than {limit:,}: no text is packed so tightly"
    return UserError(problem, where=name, fix=f"if it is what you mean, {fix}")


def _view(descriptor: int, size: int, name: str) -> mmap.mmap:
    if size == 0:
        raise UserError("the file is empty", where=name, fix="write records into it, or remove it from the recipe")
    return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)


def line_spans(file: MappedFile) -> np.ndarray:
    """[n, 2] int64: first byte and end, without the line break, of every line that is not blank."""
    size = len(file.view)
    breaks = [
        begin + np.flatnonzero(np.frombuffer(file.view, np.uint8, min(CHUNK, size - begin), begin) == 10)
        for begin in range(0, size, CHUNK)
    ]
    ends = np.append(np.concatenate(breaks), size)
    begins = np.concatenate([[file.start], ends[:-1] + 1])
    spans = np.stack([begins, ends], axis=1)[ends > begins]
    # Only short lines are checked for being blank; a longer run of spaces is a record, and an error.
    short = np.flatnonzero(spans[:, 1] - spans[:, 0] <= 64)
    blank = [line for line in short if not file.view[spans[line, 0] : spans[line, 1]].strip()]
    return np.delete(spans, blank, axis=0)
