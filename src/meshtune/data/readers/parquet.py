"""Parquet files, copied once into an Arrow file in the cache of `datasets` (HF_HOME), from which records are read in
any order. The copy is found again by the contents of the file: its name, size and time may be those of another.

`datasets` would decode a whole row group at a time, and most writers put a million records into one; the columns are
read here a thousand records at a time.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import tempfile
from collections.abc import Callable

from meshtune.data.readers.columnar import MALFORMED, ColumnarRecords, check_not_empty, check_types, root_cause
from meshtune.data.readers.mapped import DISK_FULL, check_same_file, file_status, unpacked_error, unpacked_limit
from meshtune.errors import UserError

_RECORDS = 1000  # in memory at once
_COPY = 1 << 32  # bytes of a copy beyond the limit of other files: a text that is repeated is stored once
_BUFFER = 1 << 20  # bytes read ahead of each column


def open_parquet(path: pathlib.Path, name: str) -> ColumnarRecords:
    """The records of a parquet file. Raises UserError for a file that is truncated or not parquet, and if the cache
    cannot be written."""
    _check_ends(path, name)
    import datasets
    import pyarrow
    import pyarrow.parquet
    from datasets import config

    folder = pathlib.Path(config.HF_DATASETS_CACHE)
    try:
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False) as table:
            check_types(table.schema_arrow, name)
        status = file_status(path)
        copy = folder / f"meshtune-{contents_hash(path)}.arrow"
        if not copy.exists():
            _write_copy(path, copy, name, lambda: check_same_file(path, status, name))
        return ColumnarRecords(datasets.Dataset.from_file(str(copy)), name)
    except UserError:
        raise
    except (pyarrow.ArrowException, OSError, *MALFORMED) as error:
        if isinstance(error, OSError) and (error.errno in DISK_FULL or error.filename not in (None, str(path))):
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
                    raise unpacked_error(path, name, limit, "write it again without dictionaries or compression")
        check()
        os.replace(draft, copy)
    finally:
        pathlib.Path(draft).unlink(missing_ok=True)
