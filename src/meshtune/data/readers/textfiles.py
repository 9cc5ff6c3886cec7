"""Records of .txt, .json and .jsonl files, read one at a time by an index of their bytes.

Documents that contain line breaks belong in a .jsonl file, as {"text": ...}.

JSON is not read through `datasets`, which infers one schema for all records: it refuses records that differ from each
other, adds nulls where a key is missing, and reports neither line nor column of malformed JSON.
"""

from __future__ import annotations

import array
import bisect
import errno
import functools
import gzip
import itertools
import json
import mmap
import pathlib
import re
import shlex
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from meshtune.data.conversation import Origin
from meshtune.errors import UserError
from meshtune.json_text import object_of

if TYPE_CHECKING:
    from meshtune.data.readers.parquet import RunCache

SHUFFLE_WINDOW = 1 << 26  # bytes of records, before compression, that a stream mixes with each other
CHUNK = 1 << 24  # bytes scanned at a time, which bounds the memory of a scan
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
UNPACKED, RATIO = 1 << 26, 100  # bytes, and times its size, that a packed file may hold: text is packed to a tenth
MAX_RECORD = 1 << 28  # bytes of a record
CONTEXT = 30  # characters shown on either side of a mistake


class MappedFile:
    """The bytes of `path` as `view`; `name` is what the user called the file.

    A .gz or .zst file is decompressed into a temporary file without a name (in TMPDIR), by each process that reads it,
    since records are read in any order. `start` is the offset of the first byte after a UTF-8 byte order mark. Raises
    UserError for a file that is unreadable, empty or UTF-16, and for a damaged .gz or .zst.
    """

    def __init__(self, path: pathlib.Path, name: str):
        self.path, self.name = path, name
        self.status = file_status(path)
        self.view = _map(path, name)
        self.start = 3 if self.view[:3] == b"\xef\xbb\xbf" else 0
        if self.view[:2] in (b"\xff\xfe", b"\xfe\xff"):
            fix = f"iconv -f UTF-16 -t UTF-8 {path} > new file"
            raise UserError("the file is UTF-16, not UTF-8", where=name, fix=fix)

    def __reduce__(self):
        return _open_again, (self.path, self.name, self.status)

    def check_unchanged(self) -> None:
        """Raises UserError if the file was written to since it was opened. One put in its place changes nothing here,
        since the former contents remain mapped."""
        if self.path.suffix not in PACKED:
            check_same_file(self.path, self.status, self.name)

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


@functools.lru_cache(maxsize=64)
def _open_again(path: pathlib.Path, name: str, status: tuple[int, int, int]) -> MappedFile:
    """The file that another process has open. Raises UserError if another one is in its place."""
    file = MappedFile(path, name)
    if file.status != status:
        raise changed_error(name)
    return file


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
        raise changed_error(name)


def changed_error(name: str) -> UserError:
    """The error for a file that was changed while it was read."""
    fix = "start again once nothing writes to it any more"
    return UserError("the file was changed while it was read", where=name, fix=fix)


def _open_zstd(path: pathlib.Path) -> Any:
    import pyarrow

    return pyarrow.input_stream(str(path), compression="zstd")


PACKED: dict[str, Callable[[pathlib.Path], Any]] = {".gz": gzip.open, ".zst": _open_zstd}
UNPACK = {".gz": "gunzip", ".zst": "zstd -d"}


def _map(path: pathlib.Path, name: str) -> mmap.mmap:
    try:
        if path.suffix in PACKED:
            return _map_unpacked(path, name)
        with path.open("rb") as file:
            return _view(file.fileno(), path.stat().st_size, name)
    except (gzip.BadGzipFile, EOFError, zlib.error, OSError) as error:
        raise _unreadable_error(error, path, name) from None


def _map_unpacked(path: pathlib.Path, name: str) -> mmap.mmap:
    with PACKED[path.suffix](path) as compressed, tempfile.TemporaryFile() as plain:
        limit = unpacked_limit(path.stat().st_size)
        while chunk := compressed.read(CHUNK):
            if plain.tell() + len(chunk) > limit:
                command = f"{UNPACK[path.suffix]} {shlex.quote(str(path))}"
                raise unpacked_error(path.stat().st_size, name, limit, f"unpack it yourself: {command}")
            plain.write(chunk)
        plain.flush()
        return _view(plain.fileno(), plain.tell(), name)


def _unreadable_error(error: Exception, path: pathlib.Path, name: str) -> UserError:
    if path.suffix in PACKED and getattr(error, "errno", None) is None:  # of the codecs
        kind = {".gz": "gzip", ".zst": "zstd"}[path.suffix]
        return UserError(f"the {kind} file is damaged or truncated ({error})", where=name, fix="download it again")
    assert isinstance(error, OSError)
    if error.errno in DISK_FULL and path.suffix in PACKED:
        return UserError(
            f"the file cannot be unpacked: {error.strerror}",
            where=f"{name}, {tempfile.gettempdir()}",
            fix="free space there, or set TMPDIR to a directory with more",
        )
    return UserError(f"cannot read the file: {error.strerror or error}", where=name)


def unpacked_limit(size: int) -> int:
    """The bytes that a compressed file of `size` bytes may hold."""
    return UNPACKED + RATIO * size


def unpacked_error(size: int, name: str, limit: int, fix: str) -> UserError:
    """The error for a compressed file of `size` bytes that holds more than its `limit`."""
    problem = f"the file has {size:,} bytes and holds more than {limit:,}: no text is packed so tightly"
    return UserError(problem, where=name, fix=f"if it is what you mean, {fix}")


def _view(descriptor: int, size: int, name: str) -> mmap.mmap:
    if size == 0:
        raise UserError("the file is empty", where=name, fix="write records into it, or remove it from the recipe")
    return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)


def line_spans(file: MappedFile) -> np.ndarray:
    """[n, 2] uint32 or int64: first byte and end, without the line break, of every line that is not blank."""
    size = len(file.view)
    chunks = [np.frombuffer(file.view, np.uint8, min(CHUNK, size - begin), begin) for begin in range(0, size, CHUNK)]
    lines = sum(int(np.count_nonzero(chunk == 10)) for chunk in chunks)
    spans, count, next_begin = np.empty((lines + 1, 2), offset_type(size)), 0, file.start
    for number, chunk in enumerate(chunks):
        ends = number * CHUNK + np.flatnonzero(chunk == 10)
        if number == len(chunks) - 1:
            ends = np.append(ends, size)
        if not len(ends):
            continue
        begins = np.concatenate([[next_begin], ends[:-1] + 1])
        next_begin = int(ends[-1]) + 1
        pairs = np.stack([begins, ends], axis=1)[ends > begins]
        # Only short lines are checked for being blank; a longer run of spaces is a record, and an error.
        short = np.flatnonzero(pairs[:, 1] - pairs[:, 0] <= 64)
        blank = [line for line in short if not file.view[pairs[line, 0] : pairs[line, 1]].strip()]
        pairs = np.delete(pairs, blank, axis=0)
        spans[count : count + len(pairs)] = pairs
        count += len(pairs)
    return spans[:count]


def offset_type(size: int) -> type[np.integer]:
    """The smallest type of offsets in so many bytes."""
    return np.uint32 if size < 1 << 32 else np.int64


class Records(Protocol):
    """The records of one source, read on access.

    `records[i]` raises UserError where the record is malformed. `where(i)` describes the origin for people, with the
    line number where the file has lines. `sweep()` is the fast way to read all records in order; it yields the
    UserError in place of a record that cannot be read, so that one bad line does not end the pass.
    `check_unchanged()` raises UserError if the file has changed since it was opened. `select(numbers)` are the records
    of these numbers, int64 [n], ascending, in another process too; each keeps its origin. `files` maps each file that
    the records are read from to its status when it was opened.

    `random_access(cache)` are the records as a stream reads them: what is decoded together is in `cache`. `runs` int64
    [n, 2] are the numbers of records that are, one run after another, and their bytes: 0 where each is read by itself.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...

    def origin(self, index: int) -> Origin: ...

    def where(self, index: int) -> str: ...

    def sweep(self) -> Iterator[object | UserError]: ...

    def check_unchanged(self) -> None: ...

    @property
    def runs(self) -> np.ndarray: ...

    def random_access(self, cache: RunCache, /) -> Records: ...

    def select(self, numbers: np.ndarray, /) -> Records: ...

    @property
    def files(self) -> dict[pathlib.Path, tuple[int, int, int]]: ...


def one_run(size: int) -> np.ndarray:
    """The `runs` of records that are read one by one."""
    return np.array([[size, 0]])


def line_origin(file: MappedFile, index: int, begin: int) -> str:
    """The origin of record `index`, which begins at byte `begin`, with its line."""
    return f"{Origin(file.name, index)} (line {file.line(begin)})"


class FileRecords:
    """The records of a text file, from an index of their bytes.

    `spans` [n, 2] are the first byte of each record and the one after its last. `decode(file, index, begin, end)`
    parses one record; it must be a module-level function or a partial of one, so that records can be pickled.
    `numbers` int64 [n] are those of the records in the file; None: 0, 1, ...
    """

    def __init__(
        self,
        file: MappedFile,
        spans: np.ndarray,
        decode: Callable[[MappedFile, int, int, int], object],
        numbers: np.ndarray | None = None,
    ):
        self.file, self.spans, self.decode, self.numbers = file, spans, decode, numbers

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> object:
        begin, end = (int(offset) for offset in self.spans[index])
        return self.decode(self.file, self._number(index), begin, end)

    def _number(self, index: int) -> int:
        return index if self.numbers is None else int(self.numbers[index])

    def origin(self, index: int) -> Origin:
        return Origin(self.file.name, self._number(index))

    def where(self, index: int) -> str:
        return line_origin(self.file, self._number(index), int(self.spans[index, 0]))

    @property
    def runs(self) -> np.ndarray:
        return one_run(len(self))

    def random_access(self, cache: RunCache) -> FileRecords:
        return self

    def select(self, numbers: np.ndarray) -> FileRecords:
        return FileRecords(self.file, self.spans[numbers], self.decode, numbers)

    @property
    def files(self) -> dict[pathlib.Path, tuple[int, int, int]]:
        return {self.file.path: self.file.status}

    def sweep(self) -> Iterator[object | UserError]:
        for index in range(len(self)):
            try:
                yield self[index]
            except UserError as error:
                yield error

    def check_unchanged(self) -> None:
        self.file.check_unchanged()


class ConcatenatedRecords:
    """The records of several files, perhaps all of a `folder`, in sequence. Each record keeps the name of its file and
    its index there."""

    def __init__(self, parts: Sequence[Records], folder: pathlib.Path | None = None):
        self.parts, self.folder = list(parts), folder
        self.ends = list(itertools.accumulate(len(part) for part in self.parts))

    def __len__(self) -> int:
        return self.ends[-1]

    def _locate(self, index: int) -> tuple[Records, int]:
        part = bisect.bisect_right(self.ends, index)
        return self.parts[part], index - (self.ends[part - 1] if part else 0)

    def __getitem__(self, index: int) -> object:
        part, inner = self._locate(index)
        return part[inner]

    def origin(self, index: int) -> Origin:
        part, inner = self._locate(index)
        return part.origin(inner)

    def where(self, index: int) -> str:
        part, inner = self._locate(index)
        return part.where(inner)

    def sweep(self) -> Iterator[object | UserError]:
        return itertools.chain.from_iterable(part.sweep() for part in self.parts)

    def check_unchanged(self) -> None:
        for part in self.parts:
            part.check_unchanged()

    @property
    def runs(self) -> np.ndarray:
        return np.concatenate([part.runs for part in self.parts])

    def random_access(self, cache: RunCache) -> ConcatenatedRecords:
        self.parts = [part.random_access(cache) for part in self.parts]
        return self

    def select(self, numbers: np.ndarray) -> ConcatenatedRecords:
        """The records of ascending `numbers`."""
        places = np.searchsorted(numbers, [0, *self.ends])
        begins = [0, *self.ends]
        parts = [
            part.select(numbers[places[index] : places[index + 1]] - begins[index])
            for index, part in enumerate(self.parts)
            if places[index] < places[index + 1]
        ]
        return ConcatenatedRecords(parts)

    @property
    def files(self) -> dict[pathlib.Path, tuple[int, int, int]]:
        listing = {} if self.folder is None else {self.folder: file_status(self.folder)}
        return listing | {path: status for part in self.parts for path, status in part.files.items()}


def open_text(path: pathlib.Path, name: str) -> FileRecords:
    """The lines of a text file. Raises UserError for an empty file, and on reading a line that is not UTF-8."""
    file = MappedFile(path, name)
    spans = line_spans(file)
    if not len(spans):
        raise UserError("the file contains only blank lines", where=name, fix="write text into it, or leave it out")
    return FileRecords(file, spans, _decode_line)


def _decode_line(file: MappedFile, index: int, begin: int, end: int) -> dict[str, str]:
    return {"text": file.text(begin, end).rstrip("\r")}


# A whole string (possessive, so that no string is too long), or a bracket.
TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]', re.DOTALL)
DECODER = json.JSONDecoder(object_pairs_hook=object_of)
MAX_DEPTH = 100  # lists and objects within each other
MAX_REPARSED = 1 << 26  # bytes parsed again to explain a mistake in a file that is never closed


def open_json(path: pathlib.Path, name: str, *, lines: bool) -> FileRecords:
    """The records of a .json file (an array, or objects one after another) or, with `lines`, of a .jsonl file, which
    may hold an array too.

    Raises UserError where the array is malformed outside its records, and on reading a record that is malformed, with
    line, column and the surrounding text (RFC 8259).
    """
    file = MappedFile(path, name)
    as_lines = not _holds_array(file) if lines else _looks_like_lines(file)
    spans = line_spans(file) if as_lines else _spans(file)
    if not len(spans):
        raise UserError("the file contains no records", where=name, fix="write records into it, or leave it out")
    return FileRecords(file, spans, _decode_json)


def _decode_json(file: MappedFile, index: int, begin: int, end: int) -> object:
    return parse(file, begin, end)


def parse(file: MappedFile, begin: int, end: int) -> Any:
    """The JSON value in the bytes from `begin` to `end`. Raises UserError with line and column if it is malformed."""
    text = file.text(begin, end)
    try:
        check_nesting(text)
        return DECODER.decode(text)
    except ValueError as error:
        raise _malformed_value(file, begin, text, error) from None


def _malformed_value(file: MappedFile, begin: int, text: str, error: ValueError) -> UserError:
    if isinstance(error, json.JSONDecodeError):
        return _malformed_error(file, begin + len(text[: error.pos].encode()), error.msg)
    return _malformed_error(file, begin, readable(error))


def readable(error: ValueError) -> str:
    """Describes a mistake in JSON text. Python's words for thousands of digits are for programmers."""
    return "a whole number of more than 4,300 digits" if "set_int_max_str_digits" in str(error) else str(error)


def check_nesting(text: str) -> None:
    """Raises ValueError for JSON of more than MAX_DEPTH levels: what reads it later calls itself for each."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    depth = 0
    for token in TOKEN.finditer(text.encode("utf-8", "surrogatepass")):
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(token.group(), 0)
        if depth > MAX_DEPTH:
            raise ValueError(f"nested too deeply, more than {MAX_DEPTH} levels")


def _malformed_error(file: MappedFile, offset: int, problem: str) -> UserError:
    return UserError(
        f"malformed JSON: {problem[:1].lower()}{problem[1:]}, near: {file.excerpt(offset)}",
        where=f"{file.name}, {file.position(offset)}",
        fix="correct the file at the mark (▸); .jsonl needs one complete object on every line",
    )


def _holds_array(file: MappedFile) -> bool:
    """Whether a .jsonl file is one array, not lines whose first record is a list."""
    head = TOKEN.search(file.view, file.start)
    if head is None or head.group() != b"[" or file.view[file.start : head.start()].strip():
        return False
    return _is_one_array(file, head.start())


def _is_one_array(file: MappedFile, begin: int) -> bool:
    """Whether the list at `begin` is more than the record of one line."""
    end = file.view.find(b"\n", begin)
    if end < 0 or end - begin > MAX_REPARSED or not file.view[end : end + 4096].strip():
        return True
    try:
        return not isinstance(json.loads(file.view[begin:end]), list)
    except (ValueError, RecursionError):
        return True


def _looks_like_lines(file: MappedFile) -> bool:
    """Whether the first line of a .json file is a complete object, and more text follows. Raises UserError where it is
    nested too deeply to tell."""
    first = TOKEN.search(file.view, file.start)
    if first is None or first.group() != b"{":
        return False
    end = file.view.find(b"\n", first.start())
    if end < 0 or not file.view[end : end + 4096].strip():
        return False
    if any(file.view.find(brace, end) >= 0 for brace in (b"\n{\n", b"\n{\r\n")):  # objects of several lines
        return False
    try:
        return isinstance(json.loads(file.view[first.start() : end]), dict)
    except ValueError:
        return False
    except RecursionError:  # which layout it has cannot be told
        raise _malformed_error(file, first.start(), "nested too deeply") from None


def _spans(file: MappedFile) -> np.ndarray:
    """[n, 2] uint32 or int64: first byte and end of each record of an array, or of objects one after another."""
    spans = array.array("q")  # flat: begin, end, begin, end, ...; a list of pairs would take ten times the memory
    head = file.view[file.start : file.start + 4096].lstrip()[:1]
    in_array = head == b"["
    depth, begin, last, closed = 0, 0, file.start, False
    if in_array:
        last = file.view.find(b"[", file.start) + 1
    for token in TOKEN.finditer(file.view, last):
        offset = token.start()
        character = file.view[offset : offset + 1]
        if depth == 0:
            _check_gap(file, spans, last, offset, in_array, character)
            if in_array and character == b"]":
                last, closed = token.end(), True
                break
            begin = offset
        if character in b"{[":
            depth += 1
        elif character in b"}]":
            depth -= 1
        if depth == 0:
            spans.extend((begin, token.end()))
            last = token.end()
    if depth:
        raise _first_mistake(file, spans, begin, "the last record is not closed")
    trailing = _skip_space(file, last)
    if in_array and not closed:
        raise _first_mistake(file, spans, trailing, "the list of records is not closed by ]")
    if trailing < len(file.view):
        problem = "expected a list of records" if not spans else "expected nothing more"
        raise _first_mistake(file, spans, trailing, problem)
    return np.frombuffer(spans, np.int64).reshape(-1, 2).astype(offset_type(len(file.view)))


def _check_gap(
    file: MappedFile, spans: array.array[int], last: int, offset: int, in_array: bool, character: bytes
) -> None:
    """Raises UserError unless exactly one comma separates two records of an array, and otherwise only white space."""
    gap = file.view[last:offset].strip()
    closing = character == b"]" and in_array
    separator = b"," if in_array and spans and not closing else b""
    if gap == separator and (closing or character not in b"]}"):
        return
    mistake = _skip_space(file, last)
    if gap[:1] == b"," and separator:
        mistake = _skip_space(file, mistake + 1)
    if closing and gap == b",":
        problem = "a comma after the last record"
    elif not gap and separator:
        problem = "expected a comma between records"
    else:
        problem = "expected a record"
    raise _first_mistake(file, spans, mistake, problem)


def _first_mistake(file: MappedFile, spans: array.array[int], offset: int, problem: str) -> UserError:
    """The error to report. A missing quote far above makes nonsense of everything after it, so malformed records before
    `offset` are reported first."""
    for begin, end in zip(spans[::2], spans[1::2], strict=True):
        try:
            parse(file, begin, end)
        except UserError as error:
            return error
    if problem.startswith("the last record") and len(file.view) - offset <= MAX_REPARSED:
        try:
            parse(file, offset, len(file.view))
        except UserError as error:
            return error
    return _malformed_error(file, min(offset, len(file.view)), problem)


def _skip_space(file: MappedFile, offset: int) -> int:
    match = re.compile(rb"\S").search(file.view, offset)
    return match.start() if match else len(file.view)
