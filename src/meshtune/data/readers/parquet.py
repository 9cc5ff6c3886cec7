"""Records of parquet files, on a disk or at an address of fsspec, in pieces of a row group and without a copy.

Most writers put a million records into a row group, of which parquet finds none without reading those before it. So
records are decoded a thousand at a time, forwards. A stream reads in any order within a run of records, which is then
decoded as a whole (`RunCache`): a row group, or a part of a large one.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import pathlib
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from meshtune.data.conversation import Origin
from meshtune.data.readers.columnar import (
    BLOCK,
    MALFORMED,
    ColumnarRecords,
    Reader,
    check_not_empty,
    check_types,
    decode_record,
    root_cause,
    value_readers,
)
from meshtune.data.readers.textfiles import (
    SHUFFLE_WINDOW,
    changed_error,
    file_status,
    unpacked_error,
    unpacked_limit,
)
from meshtune.errors import UserError
from meshtune.lazy import LazyFunction

if TYPE_CHECKING:
    import pyarrow

open_remote = LazyFunction("meshtune.data.readers.remote:open_file")
remote_errors = LazyFunction("meshtune.data.readers.remote:remote_errors")
file_state = LazyFunction("meshtune.data.readers.remote:file_state")
_LEAST = 1 << 10  # bytes that a record counts at least: a text that is repeated is stored once
_RECORDS = 1000  # decoded at once
_COPY = 1 << 32  # bytes beyond the limit of other files
_BUFFER, _REMOTE_BUFFER = 1 << 20, 1 << 22  # bytes read ahead of each column
_PLAIN = "write it again without dictionaries or compression"

Status = tuple[int, int, int]


class RunCache:
    """The tables of runs of records, of which those used last are kept up to `limit` bytes, and one at least."""

    def __init__(self, limit: int = 4 * SHUFFLE_WINDOW):
        self.limit, self._lock = limit, threading.Lock()
        self._tables: collections.OrderedDict[object, pyarrow.Table] = collections.OrderedDict()

    def table(self, key: object, decode: Callable[[], pyarrow.Table]) -> pyarrow.Table:
        """The table of a key, decoded if it is not here."""
        with self._lock:
            if key not in self._tables:
                self._tables[key] = decode()
                while len(self._tables) > 1 and sum(table.nbytes for table in self._tables.values()) > self.limit:
                    self._tables.popitem(last=False)
            self._tables.move_to_end(key)
            return self._tables[key]


def open_parquet(place: pathlib.Path | str, name: str, status: Status | None = None) -> ParquetRecords:
    """The records of a parquet file at a path or, as text, at an address, where its `status` is known. Raises UserError
    for a file that is truncated or not parquet, and as `open_url`."""
    if isinstance(place, pathlib.Path):
        status = file_status(place)
        _check_ends(place, name)
    assert status is not None
    check_not_empty(status[1], name)
    opening = secrets.token_hex(8)
    with _read_errors(place, name):
        reader = _parquet_reader(place, name, status, opening)
        check_types(reader.schema, name)
    if not reader.rows.sum():
        raise UserError("there are no records", where=name, fix="leave the source out")
    return ParquetRecords(place, name, status, opening, np.stack([reader.rows, reader.sizes], 1))


@contextlib.contextmanager
def _read_errors(place: pathlib.Path | str, name: str) -> Iterator[None]:
    import pyarrow

    is_local = isinstance(place, pathlib.Path)
    unreadable = (pyarrow.ArrowException, *MALFORMED, *([OSError] if is_local else []))
    with contextlib.nullcontext() if is_local else remote_errors(name):
        try:
            yield
        except UserError:
            raise
        except unreadable as error:
            problem = f"cannot read the parquet file: {root_cause(error)}"
            raise UserError(problem, where=name, fix="write or download it again") from error


class ParquetRecords:
    """The records of a parquet file as plain dicts, fast when they are read forwards or, with a `cache`, in any order
    within a run. `groups` int64 [row groups, 2] are the records and bytes of each, `numbers` int64 [n] those of the
    records in the file; None: 0, 1, ... `opening` tells what was opened at one time from what is opened later."""

    def __init__(
        self,
        place: pathlib.Path | str,
        name: str,
        status: Status,
        opening: str,
        groups: np.ndarray,
        numbers: np.ndarray | None = None,
        cache: RunCache | None = None,
    ):
        self.place, self.name, self.status, self.opening = place, name, status, opening
        self.groups, self.numbers, self.cache = groups, numbers, cache
        self._begins, self._sizes = _runs(groups, whole=cache is not None)

    def __reduce__(self):
        return ParquetRecords, (self.place, self.name, self.status, self.opening, self.groups, self.numbers)

    @property
    def reader(self) -> _ParquetReader:
        """The open file, which all records of it in this process share. Raises UserError if another one is there."""
        return _parquet_reader(self.place, self.name, self.status, self.opening)

    @property
    def files(self) -> dict[Any, Status]:
        return {self.place: self.status}

    @property
    def runs(self) -> np.ndarray:
        return np.stack([np.diff(self._begins), self._sizes], 1)

    def __len__(self) -> int:
        return int(self._begins[-1]) if self.numbers is None else len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, object]:
        record = self._read(index)
        if isinstance(record, UserError):
            raise record
        return record

    def _read(self, index: int) -> dict[str, object] | UserError:
        origin = self.origin(index)
        with _read_errors(self.place, self.name):
            begin, table = self._run(origin.record)
            return decode_record(self.reader.record(origin.record, begin, table), self.reader.value_readers, origin)

    def _run(self, number: int) -> tuple[int, pyarrow.Table]:
        """The first record of the run that has a record, and the run. Raises UserError if the file has changed."""
        run = int(np.searchsorted(self._begins, number, side="right")) - 1
        begin, end = int(self._begins[run]), int(self._begins[run + 1])

        def decode() -> pyarrow.Table:
            table = self.reader.decode(begin, end, self.name)
            self.check_unchanged()
            return table

        return begin, (self.cache or self.reader.piece).table((self.opening, begin), decode)

    def origin(self, index: int) -> Origin:
        return Origin(self.name, index if self.numbers is None else int(self.numbers[index]))

    def where(self, index: int) -> str:
        return str(self.origin(index))

    def select(self, numbers: np.ndarray) -> ParquetRecords | ColumnarRecords:
        chosen = numbers if self.numbers is None else self.numbers[numbers]
        if self.cache is None:
            return ParquetRecords(self.place, self.name, self.status, self.opening, self.groups, chosen)
        import datasets
        import pyarrow
        from datasets.table import InMemoryTable

        with _read_errors(self.place, self.name):
            runs = ((number, *self._run(number)) for number in chosen.tolist())
            table = pyarrow.concat_tables([run.slice(number - begin, 1) for number, begin, run in runs])
            table = datasets.Dataset(InMemoryTable(table.combine_chunks()), fingerprint=self.opening)
        return ColumnarRecords(table, self.name, {}, chosen)

    def sweep(self) -> Iterator[object | UserError]:
        forwards = ParquetRecords(self.place, self.name, self.status, self.opening, self.groups, self.numbers)
        return map(forwards._read, range(len(self)))

    def check_unchanged(self) -> None:
        """Raises UserError if the file was written to. A local one put in its place changes nothing."""
        status = file_status(self.place) if isinstance(self.place, pathlib.Path) else file_state(self.place)
        if status[0] == self.status[0] and status != self.status:
            raise changed_error(self.name)

    def random_access(self, cache: RunCache) -> ParquetRecords:
        return ParquetRecords(self.place, self.name, self.status, self.opening, self.groups, self.numbers, cache)


def _runs(groups: np.ndarray, *, whole: bool) -> tuple[np.ndarray, np.ndarray]:
    """The first record of each run and the end of the last, int64 [n + 1], and the bytes of each: pieces or, with
    `whole`, row groups. Those of more than two windows are divided into windows."""
    begins, sizes, begin = list[np.ndarray](), list[np.ndarray](), 0
    for rows, size in groups.tolist():
        size, pieces = max(size, _LEAST * rows), -(-rows // _RECORDS)
        parts = 1 if size <= 2 * SHUFFLE_WINDOW else min(pieces, -(-size // SHUFFLE_WINDOW))
        bounds = np.linspace(0, pieces, (parts if whole else pieces) + 1).astype(np.int64) * _RECORDS
        bounds = np.minimum(bounds, rows)
        begins.append(begin + bounds[:-1])
        sizes.append(np.diff(bounds) * size // max(rows, 1))
        begin += rows
    return np.concatenate([*begins, [begin]]), np.concatenate(sizes)


@functools.lru_cache(maxsize=16)
def _parquet_reader(place: pathlib.Path | str, name: str, status: Status, _opening: str) -> _ParquetReader:
    reader = _ParquetReader(place, status[1])
    if isinstance(place, pathlib.Path) and file_status(place) != status:
        raise changed_error(name)
    return reader


class _ParquetReader:
    """An open parquet file of `size` bytes. `rows` and `sizes` int64 [row groups] are the records and bytes of each,
    `piece` keeps the piece that was decoded last."""

    def __init__(self, place: pathlib.Path | str, size: int):
        import pyarrow.parquet

        self.size, self.limit = size, _COPY + unpacked_limit(size)
        is_local = isinstance(place, pathlib.Path)
        source, buffer = (place, _BUFFER) if is_local else (open_remote(place), _REMOTE_BUFFER)
        self._file = pyarrow.parquet.ParquetFile(source, pre_buffer=False, buffer_size=buffer)
        groups = list(map(self._file.metadata.row_group, range(self._file.metadata.num_row_groups)))
        self.schema, self.rows = self._file.schema_arrow, np.array([group.num_rows for group in groups], np.int64)
        self.sizes = np.array([group.total_byte_size for group in groups], np.int64)
        self.piece = RunCache(0)
        self._ends = np.cumsum(self.rows)
        self._pieces: Iterator[pyarrow.RecordBatch] = iter(())
        self._group, self._position, self._unpacked = -1, 0, 0  # of the next piece; bytes unpacked of its group
        self._lock, self._records = threading.Lock(), dict[int, dict[str, object]]()

    @functools.cached_property
    def value_readers(self) -> Mapping[str, Reader]:
        """The functions that decode the values of those columns whose values Arrow stores in another form."""
        import datasets

        return value_readers(datasets.Features.from_arrow_schema(self.schema))

    def record(self, number: int, begin: int, table: pyarrow.Table) -> dict[str, object]:
        """A record as Arrow stores it, of the table whose first record is `begin`."""
        with self._lock:
            if number not in self._records:
                first = (number - begin) // BLOCK * BLOCK
                self._records = dict(enumerate(table.slice(first, BLOCK).to_pylist(), begin + first))
            return dict(self._records[number])

    def decode(self, begin: int, end: int, name: str) -> pyarrow.Table:
        """Some records of one row group: quick where those before them were decoded last. Raises UserError for a row
        group that holds more than it may."""
        import pyarrow

        with self._lock:
            group = int(np.searchsorted(self._ends, begin, side="right"))
            if group != self._group or begin < self._position:
                self._pieces = self._file.iter_batches(_RECORDS, row_groups=[group])
                self._group, self._position, self._unpacked = group, int(self._ends[group] - self.rows[group]), 0
            pieces: list[pyarrow.RecordBatch] = []
            while self._position < end:
                try:
                    piece = next(self._pieces)
                except BaseException:
                    self._group = -1
                    raise
                self._unpacked += piece.nbytes
                if self._unpacked > self.limit:
                    self._group = -1
                    raise unpacked_error(self.size, name, self.limit, _PLAIN)
                if self._position >= begin:
                    pieces.append(piece)
                self._position += len(piece)
            return pyarrow.Table.from_batches(pieces)


def _check_ends(path: pathlib.Path, name: str) -> None:
    try:
        with path.open("rb") as file:
            head, size = file.read(4), path.stat().st_size
            file.seek(max(0, size - 4))
            tail = file.read(4)
    except OSError as error:
        raise UserError(f"cannot read the file: {error.strerror}", where=name) from None
    check_not_empty(size, name)
    if head != b"PAR1" or tail != b"PAR1":
        problem = (
            "truncated: its end marker is missing" if head == b"PAR1" else "not parquet: it does not begin with PAR1"
        )
        raise UserError(f"the parquet file is {problem}", where=name, fix="write or download it again")
