"""Arrow files, saved data sets and those of the hub, read through `datasets`, memory-mapped from its cache (HF_HOME).

In a column of structs every struct has the fields of all: those that a record does not have are null. A null within a
record is therefore left out, as a tool would otherwise be called with the arguments of all others.

No loading script is run (`datasets` has none since version 4) and nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import pathlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshtune.data.conversation import Origin
from meshtune.errors import UserError

if TYPE_CHECKING:
    import datasets

BLOCK = 256  # records converted to Python objects at once in a sweep: fast, and small even if each is megabytes


class ColumnarRecords:
    """The records of a `datasets.Dataset` as plain dicts. Images and audio are left undecoded."""

    def __init__(self, table: datasets.Dataset, name: str):
        if not len(table):
            raise UserError("there are no records", where=name, fix="choose another split, or leave the source out")
        self.table, self.name = table.with_format("arrow"), name

    def __len__(self) -> int:
        return len(self.table)

    @functools.cached_property
    def _nested(self) -> list[str]:
        """The columns that have structs."""
        return [field.name for field in self.table.features.arrow_schema if "struct<" in str(field.type)]

    def _block(self, begin: int, end: int) -> list[dict[str, object]]:
        records = self.table[begin:end].to_pylist()  # pyright: ignore[reportAttributeAccessIssue]: an arrow table
        for record in records:
            record |= {name: without_nulls(record[name]) for name in self._nested}
        return records

    def __getitem__(self, index: int) -> dict[str, object]:
        return self._block(index, index + 1)[0]

    def origin(self, index: int) -> Origin:
        return Origin(self.name, index)

    def where(self, index: int) -> str:
        return str(self.origin(index))

    def sweep(self) -> Iterator[object | UserError]:
        for begin in range(0, len(self), BLOCK):
            yield from self._block(begin, min(begin + BLOCK, len(self)))

    def check_unchanged(self) -> None:
        """Files of the cache are written once."""


def without_nulls(value: object) -> object:
    """`value` with the fields of its objects that are not null."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def open_arrow(path: pathlib.Path, name: str) -> ColumnarRecords:
    """The records of an Arrow stream file (as `datasets` writes) or an Arrow IPC file, memory-mapped in place."""
    check_not_empty(path.stat().st_size, name)
    import datasets
    import pyarrow
    from datasets.table import MemoryMappedTable

    try:
        with path.open("rb") as file:
            random_access = file.read(6) == b"ARROW1"
        if random_access:
            table = pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all()
            return ColumnarRecords(datasets.Dataset(MemoryMappedTable(table, str(path))), name)
        return ColumnarRecords(datasets.Dataset.from_file(str(path)), name)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
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
    except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:
        raise UserError(f"cannot read the saved data set: {root_cause(error)}", where=name) from error


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
