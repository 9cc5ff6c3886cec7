"""A file as bytes in memory that the system pages in and out, so that a 100 GB file needs no memory of ours."""

from __future__ import annotations

import gzip
import mmap
import pathlib
import shutil
import tempfile
import zlib

import numpy as np

from meshtune.errors import UserError

CHUNK = 1 << 24  # bytes looked at in one go; bounds the memory of a scan
AROUND = 30  # characters shown on either side of a mistake


class MappedFile:
    """The bytes of `path` as `view`, `name` being what the user called it.

    A .gz file is unpacked once to a nameless temporary file (in TMPDIR), because records are read in any order.
    `start` is the offset of the first byte after a UTF-8 byte order mark. Raises UserError for an unreadable, empty or
    UTF-16 file and for a broken .gz.
    """

    def __init__(self, path: pathlib.Path, name: str):
        self.path, self.name = path, name
        self.view = _map(path, name)
        self.start = 3 if self.view[:3] == b"\xef\xbb\xbf" else 0
        if self.view[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise UserError(
                "the file is UTF-16, not UTF-8", where=name, fix=f"iconv -f UTF-16 -t UTF-8 {path} > new file"
            )

    def __reduce__(self):
        return MappedFile, (self.path, self.name)

    def line(self, offset: int) -> int:
        """The number, from 1, of the line that holds the byte at `offset`."""
        return 1 + sum(
            int((np.frombuffer(self.view, np.uint8, min(CHUNK, offset - at), at) == 10).sum())
            for at in range(0, offset, CHUNK)
        )

    def position(self, offset: int) -> str:
        """`line 3, column 14`: columns count characters from 1."""
        before = self.view.rfind(b"\n", 0, offset) + 1 or self.start
        column = len(self.view[before:offset].decode("utf-8", "replace")) + 1
        return f"line {self.line(offset)}, column {column}"

    def around(self, offset: int) -> str:
        """The text on both sides of `offset`, with the place marked by ▸."""
        left = self.view[max(self.start, offset - 4 * AROUND) : offset].decode("utf-8", "replace")[-AROUND:]
        right = self.view[offset : offset + 4 * AROUND].decode("utf-8", "replace")[:AROUND]
        return f"{left}▸{right}".replace("\r", "").replace("\n", "⏎")

    def text(self, begin: int, end: int) -> str:
        """The bytes from `begin` to `end` as text; UserError with the position where they are not UTF-8."""
        try:
            return self.view[begin:end].decode("utf-8")
        except UnicodeDecodeError as error:
            at = begin + error.start
            raise UserError(
                f"the text is not valid UTF-8: byte 0x{self.view[at]:02x}",
                where=f"{self.name}, {self.position(at)}",
                fix="save the file as UTF-8",
            ) from None


def _map(path: pathlib.Path, name: str) -> mmap.mmap:
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as packed, tempfile.TemporaryFile() as unpacked:
                shutil.copyfileobj(packed, unpacked, CHUNK)
                unpacked.flush()
                return _view(unpacked.fileno(), unpacked.tell(), name)
        with path.open("rb") as file:
            return _view(file.fileno(), path.stat().st_size, name)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"the gzip file is broken or cut short ({error})", where=name, fix="fetch it again") from None
    except OSError as error:
        raise UserError(f"cannot read the file: {error.strerror or error}", where=name) from None


def _view(descriptor: int, size: int, name: str) -> mmap.mmap:
    if size == 0:
        raise UserError("the file is empty", where=name, fix="write records into it, or take it out of the recipe")
    return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)


def line_spans(file: MappedFile) -> np.ndarray:
    """[n, 2] int64: begin and end (without the line end) of every line that is not blank."""
    size = len(file.view)
    breaks = [
        at + np.flatnonzero(np.frombuffer(file.view, np.uint8, min(CHUNK, size - at), at) == 10)
        for at in range(0, size, CHUNK)
    ]
    ends = np.append(np.concatenate(breaks), size)
    begins = np.concatenate([[file.start], ends[:-1] + 1])
    spans = np.stack([begins, ends], axis=1)[ends > begins]
    # Only a short line is worth reading to see whether it is blank; a longer run of spaces is a record, and an error.
    short = np.flatnonzero(spans[:, 1] - spans[:, 0] <= 64)
    blank = [row for row in short if not file.view[spans[row, 0] : spans[row, 1]].strip()]
    return np.delete(spans, blank, axis=0)
