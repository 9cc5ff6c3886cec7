"""Parquet, Arrow and hub data sets, through `datasets`: memory-mapped from its cache, which HF_HOME places.

No loading script is run (`datasets` 4 and later has none) and nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from meshtune.data.conversation import Origin
from meshtune.errors import UserError

if TYPE_CHECKING:
    import datasets

BLOCK = 256  # rows turned into Python objects at once in a sweep: quick, and small even when rows are megabytes


class ColumnarRecords:
    """Rows of a `datasets.Dataset` as plain dicts; images and audio stay undecoded."""

    def __init__(self, rows: datasets.Dataset, name: str):
        if not len(rows):
            raise UserError("there are no records", where=name, fix="choose another split, or leave the source out")
        self.rows, self.name = rows.with_format("arrow"), name

    def __len__(self) -> int:
        return len(self.rows)

    def _block(self, begin: int, end: int) -> list[dict[str, Any]]:
        return self.rows[begin:end].to_pylist()  # pyright: ignore[reportAttributeAccessIssue]: an arrow table

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._block(index, index + 1)[0]

    def origin(self, index: int) -> Origin:
        return Origin(self.name, index)

    def where(self, index: int) -> str:
        return str(self.origin(index))

    def sweep(self) -> Iterator[Any | UserError]:
        for begin in range(0, len(self), BLOCK):
            yield from self._block(begin, min(begin + BLOCK, len(self)))


def open_parquet(path: pathlib.Path, name: str) -> ColumnarRecords:
    """A parquet file, copied once into the cache of `datasets`. UserError where it is not whole."""
    with path.open("rb") as file:
        head, size = file.read(4), path.stat().st_size
        file.seek(max(0, size - 4))
        tail = file.read(4)
    _not_empty(size, name)
    if head != b"PAR1" or tail != b"PAR1":
        what = "cut short: its end mark is missing" if head == b"PAR1" else "not parquet: it does not begin with PAR1"
        raise UserError(f"the parquet file is {what}", where=name, fix="write or fetch it again")
    import datasets
    import pyarrow
    from datasets.exceptions import DatasetsError

    with _quiet(bars=False):
        try:
            return ColumnarRecords(datasets.Dataset.from_parquet(str(path)), name)  # pyright: ignore[reportArgumentType]
        except (DatasetsError, pyarrow.ArrowException, OSError, ValueError) as error:
            raise UserError(f"cannot read the parquet file: {_reason(error)}", where=name) from error


def open_arrow(path: pathlib.Path, name: str) -> ColumnarRecords:
    """An Arrow stream file (as `datasets` writes) or an Arrow IPC file, memory-mapped where it lies."""
    _not_empty(path.stat().st_size, name)
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
        raise UserError(f"cannot read the arrow file: {_reason(error)}", where=name, fix=fix) from error


def open_saved(path: pathlib.Path, name: str, split: str) -> ColumnarRecords:
    """A folder that `datasets` wrote with save_to_disk: a data set, or several splits of one."""
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
        raise UserError(f"cannot read the saved data set: {_reason(error)}", where=name) from error


def open_hub(
    name: str, *, subset: str | None, split: str, revision: str | None, folder: str | None = None
) -> ColumnarRecords:
    """A data set of the Hugging Face hub, from its cache or fetched into it (HF_TOKEN, HF_HUB_OFFLINE are honoured).

    Raises UserError: no network and not in the cache, no such data set or no access, no such subset or split.
    """
    import datasets
    from datasets import exceptions

    where = f"data set {name}" + (f", subset {subset}" if subset else "") + f", split {split}"
    with _quiet(bars=True):
        try:
            rows = datasets.load_dataset(
                name, name=subset, split=split, revision=revision, data_dir=folder, streaming=False
            )
        except exceptions.DatasetNotFoundError as error:
            raise UserError(
                f"the Hugging Face hub has no data set '{name}' that you may read, and there is no such file here",
                where=where,
                fix="check the spelling; for a gated or private one set HF_TOKEN and accept its terms on its page",
            ) from error
        except exceptions.DataFilesNotFoundError as error:
            raise UserError(f"no data files in it: {_reason(error)}", where=where) from error
        except ConnectionError as error:
            raise _offline(name, where) from error
        except (exceptions.DatasetsError, ValueError, RuntimeError, OSError) as error:
            if _is_offline(error):
                raise _offline(name, where) from error
            raise UserError(
                f"cannot load the data set: {_reason(error)}", where=where, fix="check subset, split and revision"
            ) from error
    return ColumnarRecords(rows, name)  # pyright: ignore[reportArgumentType]: with a split it is one Dataset


def _offline(name: str, where: str) -> UserError:
    asked = [key for key in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE") if os.environ.get(key, "0") not in ("", "0")]
    why = f"{' and '.join(asked)} is set" if asked else "the Hugging Face hub cannot be reached"
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    lift = f"unset {' '.join(asked)}" if asked else "connect"
    return UserError(
        f"'{name}' is no file here, and as a hub data set it is not in the cache ({home}), and {why}",
        where=where,
        fix=f"{lift}; or fill the cache once where there is a network, with this HF_HOME: "
        f"python -c \"import datasets; datasets.load_dataset('{name}')\"; or give the path of a local file",
    )


def _is_offline(error: BaseException | None) -> bool:
    """`datasets` wraps a lost connection in errors of its own."""
    while error is not None:
        if isinstance(error, ConnectionError) or "Offline" in type(error).__name__:
            return True
        error = error.__cause__ or error.__context__
    return False


def _not_empty(size: int, name: str) -> None:
    if not size:
        raise UserError("the file is empty", where=name, fix="write records into it, or take it out of the recipe")


def _reason(error: BaseException) -> str:
    """The first sentence of the innermost cause: `datasets` wraps what happened in "an error occurred"."""
    while error.__cause__ is not None:
        error = error.__cause__
    return re.split(r"\n", str(error).strip(), maxsplit=1)[0] or type(error).__name__


@contextlib.contextmanager
def _quiet(*, bars: bool) -> Iterator[None]:
    """Keeps the retry notes of `datasets` and the hub client, and at will their bars, from hiding our own error."""
    import datasets

    loggers = [logging.getLogger(name) for name in ("huggingface_hub", "datasets")]
    levels = [logger.level for logger in loggers]
    drawn = datasets.is_progress_bar_enabled()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    if not bars:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if drawn:
            datasets.enable_progress_bars()
