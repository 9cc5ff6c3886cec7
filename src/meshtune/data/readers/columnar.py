"""Records of Arrow files and of data sets, memory-mapped through datasets.

Records are those that `datasets` gives, but for two things. In a column of structs every struct has the fields of all:
those that a record does not have are null. A null within a struct is therefore left out, as a tool would otherwise be
called with the arguments of all others. And images, audio and other media are left undecoded.

No loading script is run (`datasets` has none since version 4) and nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from meshtune.data.conversation import Origin
from meshtune.data.readers.textfiles import (
    check_nesting,
    check_same_file,
    file_status,
    one_run,
    unpacked_error,
    unpacked_limit,
)
from meshtune.errors import UserError

if TYPE_CHECKING:
    import datasets
    import numpy as np
    import pyarrow

    from meshtune.data.readers.parquet import RunCache

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
        return value_readers(self.table.features)

    def _block(self, begin: int, end: int) -> Iterator[dict[str, object] | UserError]:
        rows = self.table[begin:end].to_pylist()  # pyright: ignore[reportAttributeAccessIssue]: an arrow table
        return (decode_record(record, self._readers, self.origin(index)) for index, record in enumerate(rows, begin))

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

    @property
    def runs(self) -> np.ndarray:
        return one_run(len(self))

    def random_access(self, cache: RunCache) -> ColumnarRecords:
        return self

    def check_unchanged(self) -> None:
        """Raises UserError if a file was written to."""
        for path, status in self.files.items():
            check_same_file(path, status, self.name)


def value_readers(features: Mapping[str, object]) -> dict[str, Reader]:
    readers = {name: value_reader(feature) for name, feature in features.items()}
    return {name: reader for name, reader in readers.items() if reader is not None}


def decode_record(
    record: dict[str, object], readers: Mapping[str, Reader], origin: Origin
) -> dict[str, object] | UserError:
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
            limit, size = unpacked_limit(path.stat().st_size), 0
            for batch in map(batches.get_batch, range(batches.num_record_batches)) if random_access else batches:
                size += batch.nbytes
                if size > limit:
                    raise unpacked_error(path.stat().st_size, name, limit, "write it again without compression")
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
