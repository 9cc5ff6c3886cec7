"""Parquet files, copied once into an Arrow file in the cache of `datasets` (HF_HOME), from which records are read in
any order.

`datasets` would decode a whole row group at a time, and most writers put a million records into one; the columns are
read here a thousand records at a time.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import tempfile

from meshtune.data.readers.columnar import ColumnarRecords, check_not_empty, root_cause
from meshtune.data.readers.mapped import DISK_FULL
from meshtune.errors import UserError

_RECORDS = 1000  # in memory at once
_BUFFER = 1 << 20  # bytes read ahead of each column


def open_parquet(path: pathlib.Path, name: str) -> ColumnarRecords:
    """The records of a parquet file. Raises UserError for a file that is truncated or not parquet, and if the cache
    cannot be written."""
    _check_ends(path, name)
    import datasets
    import pyarrow

    copy = _copy_of(path)
    try:
        if not copy.exists():
            _write_copy(path, copy)
        return ColumnarRecords(datasets.Dataset.from_file(str(copy)), name)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        if isinstance(error, OSError) and (error.errno in DISK_FULL or error.filename not in (None, str(path))):
            problem = f"the file cannot be copied into the cache of data sets: {error.strerror}"
            fix = "free space there, or set HF_HOME to a directory that can be written"
            raise UserError(problem, where=f"{name}, {copy.parent}", fix=fix) from error
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


def _copy_of(path: pathlib.Path) -> pathlib.Path:
    """The place in the cache of a copy of the file as it is now."""
    from datasets import config

    status = path.stat()
    version = f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"
    return (
        pathlib.Path(config.HF_DATASETS_CACHE) / f"meshtune-{hashlib.sha256(version.encode()).hexdigest()[:32]}.arrow"
    )


def _write_copy(path: pathlib.Path, copy: pathlib.Path) -> None:
    """Writes the copy, which becomes visible only once it is complete."""
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
            for batch in table.iter_batches(_RECORDS):
                stream.write_batch(batch)
        os.replace(draft, copy)
    finally:
        pathlib.Path(draft).unlink(missing_ok=True)
