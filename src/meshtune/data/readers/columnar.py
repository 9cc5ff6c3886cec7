"""Records of Arrow files and of data sets, memory-mapped through datasets, and of parquet files, which are read in
pieces of a row group.

Records are those that `datasets` gives, but for two things. In a column of structs every struct has the fields of all:
those that a record does not have are null. A null within a struct is therefore left out, as a tool would otherwise be
called with the arguments of all others. And images, audio and other media are left undecoded.

No loading script is run (`datasets` has none since version 4) and nothing is unpickled.

Most writers put a million records into a row group, of which parquet finds none without reading those before it. So
records are read a thousand at a time, forwards. Where they are read in any order (`random_access`), in a stream, the
file is copied into the cache of `datasets` (HF_HOME) first.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import hashlib
import itertools
import logging
import os
import pathlib
import re
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from meshtune.data.conversation import Origin
from meshtune.data.readers.textfiles import (
    DISK_FULL,
    changed_error,
    check_nesting,
    check_same_file,
    file_status,
    unpacked_error,
    unpacked_limit,
)
from meshtune.errors import UserError

if TYPE_CHECKING:
    import datasets
    import numpy as np
    import pyarrow
    import pyarrow.parquet

Reader = Callable[[Any], object]
# What `datasets` raises for JSON of the wrong types in a data set's own files, or in the metadata of its tables.
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
BLOCK = 256  # records converted to Python objects at once in a sweep: fast, and small even if each is megabytes


class ColumnarRecords:
    """The records of a `datasets.Dataset` as plain dicts. `files` are the user's own that they come from, those of the
    cache by default, `numbers` those of the records in the data set. `reopen` opens all records in another process,
    where `datasets` cannot."""

    def __init__(
        self,
        table: datasets.Dataset,
        name: str,
        files: dict[pathlib.Path, tuple[int, int, int]] | None = None,
        numbers: np.ndarray | None = None,
        reopen: Callable[[], ColumnarRecords] | None = None,
    ):
        if not len(table):
            raise UserError("there are no records", where=name, fix="choose another split, or leave the source out")
        if files is None:
            paths = [pathlib.Path(cached["filename"]) for cached in table.cache_files]
            files = {path: file_status(path) for path in paths}
        self.table, self.name, self.files = table.with_format("arrow"), name, files
        self._numbers, self._reopen = numbers, reopen

    def __reduce__(self):
        if self._reopen is None:
            return ColumnarRecords, (self.table, self.name, self.files, self._numbers)
        return _open_again, (self._reopen, self._numbers)

    def __len__(self) -> int:
        return len(self.table)

    @functools.cached_property
    def _readers(self) -> dict[str, Reader]:
        """The functions that decode the values of those columns whose values Arrow stores in another form."""
        return _value_readers(self.table.features)

    def _block(self, begin: int, end: int) -> Iterator[dict[str, object] | UserError]:
        rows = self.table[begin:end].to_pylist()  # pyright: ignore[reportAttributeAccessIssue]: an arrow table
        return (_decode(record, self._readers, self.origin(index)) for index, record in enumerate(rows, begin))

    def __getitem__(self, index: int) -> dict[str, object]:
        record = next(self._block(index, index + 1))
        if isinstance(record, UserError):
            raise record
        return record

    def origin(self, index: int) -> Origin:
        return Origin(self.name, index if self._numbers is None else int(self._numbers[index]))

    def select(self, numbers: np.ndarray) -> ColumnarRecords:
        return ColumnarRecords(self.table.select(numbers), self.name, self.files, numbers, self._reopen)

    def where(self, index: int) -> str:
        return str(self.origin(index))

    def sweep(self) -> Iterator[object | UserError]:
        for begin in range(0, len(self), BLOCK):
            yield from self._block(begin, min(begin + BLOCK, len(self)))

    def random_access(self) -> ColumnarRecords:
        return self

    def check_unchanged(self) -> None:
        """Raises UserError if a file was written to."""
        for path, status in self.files.items():
            check_same_file(path, status, self.name)


def _value_readers(features: Mapping[str, object]) -> dict[str, Reader]:
    readers = {name: value_reader(feature) for name, feature in features.items()}
    return {name: reader for name, reader in readers.items() if reader is not None}


def _decode(record: dict[str, object], readers: Mapping[str, Reader], origin: Origin) -> dict[str, object] | UserError:
    """A record with the values that Arrow stores in another form decoded."""
    for name, reader in readers.items():
        try:
            record[name] = reader(record[name])
        except ValueError as error:
            problem, where = f"the column has JSON that cannot be read: {error}", f"{origin}, field '{name}'"
            return UserError(problem, where=where, fix="correct it")
    return record


def _open_again(reopen: Callable[[], ColumnarRecords], numbers: np.ndarray | None) -> ColumnarRecords:
    records = reopen()
    return records if numbers is None else records.select(numbers)


def value_reader(feature: object) -> Reader | None:
    """The function that decodes a value of a feature of `datasets`; None where Arrow stores the value itself."""
    import datasets

    if isinstance(feature, datasets.Json):
        return _json_value if feature.decode else None
    if isinstance(feature, datasets.List | datasets.LargeList):
        inner = value_reader(feature.feature)
        return None if inner is None else lambda value: value and [inner(item) for item in value]
    if not isinstance(feature, dict):
        return None
    readers = {name: value_reader(inner) for name, inner in feature.items()}
    readers = {name: reader for name, reader in readers.items() if reader is not None}

    def struct(value: Any) -> object:
        return value and {
            name: readers[name](inner) if name in readers else inner
            for name, inner in value.items()
            if inner is not None
        }

    return struct


def _json_value(text: str | None) -> object:
    import datasets

    if text is not None:
        check_nesting(text)
    return datasets.Json().decode_example(text)


def open_arrow(path: pathlib.Path, name: str) -> ColumnarRecords:
    """The records of an Arrow stream file (as `datasets` writes) or an Arrow IPC file, memory-mapped in place."""
    check_not_empty(path.stat().st_size, name)
    import datasets
    import pyarrow
    from datasets.table import MemoryMappedTable

    try:
        with path.open("rb") as file:
            random_access = file.read(6) == b"ARROW1"
        reader = pyarrow.ipc.open_file if random_access else pyarrow.ipc.open_stream
        with pyarrow.memory_map(str(path)) as file:
            batches = reader(file)
            check_types(batches.schema, name)
            limit, size = unpacked_limit(path), 0
            for batch in map(batches.get_batch, range(batches.num_record_batches)) if random_access else batches:
                size += batch.nbytes
                if size > limit:
                    raise unpacked_error(path, name, limit, "write it again without compression")
        if random_access:
            table = pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all()
            dataset = datasets.Dataset(MemoryMappedTable(table, str(path)))
            return ColumnarRecords(dataset, name, reopen=functools.partial(open_arrow, path, name))
        return ColumnarRecords(datasets.Dataset.from_file(str(path)), name)
    except UserError:
        raise
    except (pyarrow.ArrowException, OSError, *MALFORMED) as error:
        fix = "write it again with datasets' save_to_disk, or pyarrow.ipc"
        raise UserError(f"cannot read the arrow file: {root_cause(error)}", where=name, fix=fix) from error


def open_saved(path: pathlib.Path, name: str, split: str) -> ColumnarRecords:
    """A directory that `datasets` wrote with save_to_disk: a data set, or the split `split` of one."""
    import datasets
    import pyarrow

    if (path / "dataset_dict.json").exists():
        splits = sorted(child.name for child in path.iterdir() if (child / "state.json").exists())
        if split not in splits:
            raise UserError(
                f"the saved data set has no split '{split}'",
                where=name,
                fix=f"set split to one of: {', '.join(splits)}",
            )
        path = path / split
    try:
        return ColumnarRecords(datasets.Dataset.load_from_disk(str(path)), name)
    except (pyarrow.ArrowException, OSError, *MALFORMED) as error:
        fix = "write it again with datasets' save_to_disk"
        raise UserError(f"cannot read the saved data set: {root_cause(error)}", where=name, fix=fix) from error


def check_types(schema: pyarrow.Schema, name: str) -> None:
    """Raises UserError for a column of a type that `datasets` does not have."""
    from datasets.features.features import generate_from_arrow_type

    for field in schema:
        try:
            generate_from_arrow_type(field.type)
        except ValueError:
            raise UserError(
                f"the column '{field.name}' is of the type {field.type}, which data sets do not have",
                where=name,
                fix=f"write the file again with it as text, or without it: table.drop_columns(['{field.name}'])",
            ) from None


def check_not_empty(size: int, name: str) -> None:
    """Raises UserError if a file has no bytes."""
    if not size:
        raise UserError("the file is empty", where=name, fix="write records into it, or remove it from the recipe")


def root_cause(error: BaseException) -> str:
    """The first line of the innermost cause, since `datasets` wraps errors in "an error occurred"."""
    while error.__cause__ is not None:
        error = error.__cause__
    return re.split(r"\n", str(error).strip(), maxsplit=1)[0] or type(error).__name__


@contextlib.contextmanager
def quiet_datasets(*, progress_bars: bool) -> Iterator[None]:
    """Silences the warnings of `datasets` and the hub client, which would bury our own error, and their progress bars
    unless `progress_bars`."""
    import datasets

    loggers = [logging.getLogger(name) for name in ("huggingface_hub", "datasets")]
    levels = [logger.level for logger in loggers]
    bars_enabled = datasets.is_progress_bar_enabled()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    if not progress_bars:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if bars_enabled:
            datasets.enable_progress_bars()


_RECORDS = 1000  # in memory at once
_COPY = 1 << 32  # bytes of a copy beyond the limit of other files: a text that is repeated is stored once
_BUFFER = 1 << 20  # bytes read ahead of each column
_PLAIN = "write it again without dictionaries or compression"


def open_parquet(path: pathlib.Path, name: str) -> ParquetRecords:
    """The records of a parquet file. Raises UserError for a file that is truncated or not parquet."""
    _check_ends(path, name)
    with _parquet_errors(name):
        records = ParquetRecords(path, name, file_status(path), secrets.token_hex(8))
        check_types(records.reader.schema, name)
    if not len(records):
        raise UserError("there are no records", where=name, fix="leave the source out")
    return records


@contextlib.contextmanager
def _parquet_errors(name: str) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except UserError:
        raise
    except (pyarrow.ArrowException, OSError, *MALFORMED) as error:
        problem = f"cannot read the parquet file: {root_cause(error)}"
        raise UserError(problem, where=name, fix="write or download it again") from error


class ParquetRecords:
    """The records of a parquet file as plain dicts, fast when they are read forwards. `numbers` int64 [n] are those of
    the records in the file; None: 0, 1, ... `opening` tells what was opened at one time from what is opened later."""

    def __init__(
        self,
        path: pathlib.Path,
        name: str,
        status: tuple[int, int, int],
        opening: str,
        numbers: np.ndarray | None = None,
    ):
        self.path, self.name, self.status, self.opening, self.numbers = path, name, status, opening, numbers

    @property
    def reader(self) -> _ParquetReader:
        """The open file, which all records of it in this process share. Raises UserError if another one is there."""
        return _parquet_reader(self.path, self.name, self.status, self.opening)

    @property
    def files(self) -> dict[pathlib.Path, tuple[int, int, int]]:
        return {self.path: self.status}

    def __len__(self) -> int:
        return self.reader.rows if self.numbers is None else len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, object]:
        record = self._read(index)
        if isinstance(record, UserError):
            raise record
        return record

    def _read(self, index: int) -> dict[str, object] | UserError:
        origin = self.origin(index)
        with _parquet_errors(self.name):
            record, readers = self.reader.read(origin.record, self.name)
        return _decode(record, readers, origin)

    def origin(self, index: int) -> Origin:
        return Origin(self.name, index if self.numbers is None else int(self.numbers[index]))

    def where(self, index: int) -> str:
        return str(self.origin(index))

    def select(self, numbers: np.ndarray) -> ParquetRecords:
        chosen = numbers if self.numbers is None else self.numbers[numbers]
        return ParquetRecords(self.path, self.name, self.status, self.opening, chosen)

    def sweep(self) -> Iterator[object | UserError]:
        return map(self._read, range(len(self)))

    def check_unchanged(self) -> None:
        """Raises UserError if the file was written to."""
        check_same_file(self.path, self.status, self.name)

    def random_access(self) -> ColumnarRecords:
        """The same records from a copy in the cache of `datasets`. Raises UserError if it cannot be written."""
        records = _copied_parquet(self.path, self.name, self.status)
        return records if self.numbers is None else records.select(self.numbers)


@functools.lru_cache(maxsize=16)
def _parquet_reader(path: pathlib.Path, name: str, status: tuple[int, int, int], _opening: str) -> _ParquetReader:
    reader = _ParquetReader(path)
    if file_status(path) != status:
        raise changed_error(name)
    return reader


class _ParquetReader:
    """An open parquet file, of which some records are in memory: those of a piece of a row group."""

    def __init__(self, path: pathlib.Path):
        import pyarrow.parquet

        self.path, self.limit = path, _COPY + unpacked_limit(path)
        self._file = pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER)
        metadata = self._file.metadata
        self.schema, self.rows = self._file.schema_arrow, metadata.num_rows
        self._ends = list(itertools.accumulate(metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)))
        self._lock = threading.Lock()
        self._pieces: Iterator[pyarrow.RecordBatch] = iter(())
        self._piece: pyarrow.RecordBatch | None = None
        self._begin, self._group, self._size = 0, -1, 0  # of the piece; `_size` bytes were read of its group
        self._records: dict[int, dict[str, object]] = {}

    @functools.cached_property
    def _readers(self) -> dict[str, Reader]:
        """The functions that decode the values of those columns whose values Arrow stores in another form."""
        import datasets

        return _value_readers(datasets.Features.from_arrow_schema(self.schema))

    def read(self, number: int, name: str) -> tuple[dict[str, object], Mapping[str, Reader]]:
        """A record as Arrow stores it, and the functions that decode its values. Raises UserError for a row group that
        holds more than it may."""
        with self._lock:
            if number not in self._records:
                piece = self._seek(number, name)
                first = (number - self._begin) // BLOCK * BLOCK
                records = piece.slice(first, BLOCK).to_pylist()
                self._records = dict(enumerate(records, self._begin + first))
            return dict(self._records[number]), self._readers

    def _seek(self, number: int, name: str) -> pyarrow.RecordBatch:
        """The piece that has a record."""
        group = bisect.bisect_right(self._ends, number)
        if group != self._group or number < self._begin:
            self._pieces = self._file.iter_batches(_RECORDS, row_groups=[group])
            self._begin, self._group, self._size = self._ends[group - 1] if group else 0, group, 0
            self._piece = None
        while self._piece is None or number >= self._begin + len(self._piece):
            self._begin += 0 if self._piece is None else len(self._piece)
            self._piece = piece = next(self._pieces)
            self._size += piece.nbytes
            if self._size > self.limit:
                self._group = -1
                raise unpacked_error(self.path, name, self.limit, _PLAIN)
        return self._piece


def _copied_parquet(path: pathlib.Path, name: str, status: tuple[int, int, int]) -> ColumnarRecords:
    import datasets
    from datasets import config

    folder = pathlib.Path(config.HF_DATASETS_CACHE)
    try:
        copy = folder / f"meshtune-{contents_hash(path)}.arrow"
        if not copy.exists():
            _write_copy(path, copy, name, lambda: check_same_file(path, status, name))
        return ColumnarRecords(datasets.Dataset.from_file(str(copy)), name, {path: status})
    except OSError as error:
        if error.errno in DISK_FULL or error.filename not in (None, str(path)):
            problem = f"the file cannot be copied into the cache of data sets: {error.strerror}"
            fix = "free space there, or set HF_HOME to a directory that can be written"
            raise UserError(problem, where=f"{name}, {folder}", fix=fix) from error
        problem = f"cannot read the parquet file: {root_cause(error)}"
        raise UserError(problem, where=name, fix="write or download it again") from error


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


def contents_hash(path: pathlib.Path) -> str:
    """A hash of the contents of a file, 32 hex digits."""
    status = path.stat()
    return _contents_hash(path.resolve(), (*file_status(path), status.st_ctime_ns, status.st_dev))


@functools.lru_cache(maxsize=256)
def _contents_hash(path: pathlib.Path, _status: tuple[int, ...]) -> str:
    """Remembered in this process by the time of the inode's last change, which every write sets."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def _write_copy(path: pathlib.Path, copy: pathlib.Path, name: str, check: Callable[[], None]) -> None:
    """Writes the copy, which becomes visible only once it is complete and `check` has found the file unchanged."""
    import pyarrow
    import pyarrow.parquet

    copy.parent.mkdir(parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(dir=copy.parent, prefix=f"{copy.name}.")
    try:
        with (
            os.fdopen(descriptor, "wb") as sink,
            pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER) as table,
            pyarrow.ipc.new_stream(sink, table.schema_arrow) as stream,
        ):
            limit = _COPY + unpacked_limit(path)
            for batch in table.iter_batches(_RECORDS):
                stream.write_batch(batch)
                if sink.tell() > limit:
                    raise unpacked_error(path, name, limit, _PLAIN)
        check()
        os.replace(draft, copy)
    finally:
        pathlib.Path(draft).unlink(missing_ok=True)
