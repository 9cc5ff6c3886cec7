"""Data sets of ModelScope: their files are downloaded by its package and read by `datasets`."""

from __future__ import annotations

import hashlib
import pathlib

from meshtune.data.readers.columnar import MALFORMED, ColumnarRecords, quiet_datasets, root_cause
from meshtune.data.readers.parquet import contents_hash
from meshtune.errors import UserError
from meshtune.weights.modelscope import PREFIX, download_data


def open_modelscope(
    repository: str, *, subset: str | None, split: str, revision: str | None, folder: str | None = None
) -> ColumnarRecords:
    """A split of a data set. Raises UserError as `download_data` does, and for a subset or split that it has not."""
    import datasets
    from datasets import config, exceptions

    name = f"{PREFIX}{repository}"
    directory = download_data(repository, revision)
    cache = f"{config.HF_DATASETS_CACHE}/modelscope-{_contents(directory)}"
    with quiet_datasets(progress_bars=True):
        try:
            table = datasets.load_dataset(str(directory), name=subset, split=split, data_dir=folder, cache_dir=cache)
        except (exceptions.DatasetsError, RuntimeError, OSError, *MALFORMED) as error:
            where = f"data set {name}" + (f", subset {subset}" if subset else "") + f", split {split}"
            raise UserError(
                f"cannot load the data set: {root_cause(error)}", where=where, fix="check subset, split and revision"
            ) from error
    return ColumnarRecords(table, name)  # pyright: ignore[reportArgumentType]: with a split it is one Dataset


def _contents(directory: pathlib.Path) -> str:
    """A hash of the files of a data set, which names the copy of `datasets`: by default it goes by their times."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    listed = "".join(f"{path.relative_to(directory)} {contents_hash(path)}\n" for path in files)
    return hashlib.sha256(listed.encode()).hexdigest()[:32]
