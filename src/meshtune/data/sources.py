"""Opens the data sources of a recipe: a file, a folder of files, here or on an object store, or a data set of the hub.

Local .json, .jsonl, .csv, .tsv and .txt files (also .gz and .zst) are read lazily from an index of where each record
begins, .parquet in pieces of a row group; .arrow and hub data sets go through `datasets`, memory-mapped from its cache
(HF_HOME). A stream reads parquet files of a hub or an object store where they are. Nothing is unpickled, and no code of
a data set is run. Tasks of reasoning-gym are made by that package.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import pathlib
import re
from collections.abc import Callable

from meshtune.config.data_options import GYM, SourceOptions
from meshtune.data.readers.textfiles import PACKED, ConcatenatedRecords, Records, open_json, open_text
from meshtune.errors import UserError
from meshtune.lazy import LazyFunction
from meshtune.weights.hub import modelscope_id

open_csv = LazyFunction("meshtune.data.readers.csvfile:open_csv")
open_gym = LazyFunction("meshtune.data.readers.reasoning_gym:open_gym")
open_hub = LazyFunction("meshtune.data.readers.hub:open_hub")
open_modelscope = LazyFunction("meshtune.data.readers.hub:open_modelscope")
open_url = LazyFunction("meshtune.data.readers.remote:open_url")
open_saved = LazyFunction("meshtune.data.readers.columnar:open_saved")
READERS: dict[str, Callable[[pathlib.Path, str], Records]] = {
    ".json": functools.partial(open_json, lines=False),
    ".jsonl": functools.partial(open_json, lines=True),
    ".csv": open_csv,
    ".tsv": functools.partial(open_csv, delimiter="\t"),
    ".txt": open_text,
    ".parquet": LazyFunction("meshtune.data.readers.parquet:open_parquet"),
    ".arrow": LazyFunction("meshtune.data.readers.columnar:open_arrow"),
}
COMPRESSIBLE = (".json", ".jsonl", ".csv", ".tsv", ".txt")  # also read with .gz or .zst appended
COMPRESSED = {".bz2": "bzip2 -dk", ".xz": "xz -dk", ".zip": "unzip", ".tar": "tar -xf"}
SUPPORTED = f"{', '.join(READERS)}, and {', '.join(COMPRESSIBLE)} with .gz or .zst"
URL = re.compile(r"[a-z][a-z0-9+.-]+://")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclasses.dataclass(frozen=True)
class DataSource(SourceOptions):
    """A source of records, as described by a recipe or by an entry of a registry.

    `sample` draws that many records by the seed (a registry's num_samples), `cap` takes the first ones. `hub` says that
    `path` is an id of the Hugging Face hub.
    """

    path: str
    folder: str | None = None
    sample: int | None = None
    hub: bool = False

    @functools.cached_property
    def pictures_folder(self) -> str | None:
        """The folder that relative paths of pictures are below, unless vision.media_dir names one: the data's own."""
        path = pathlib.Path(self.path).expanduser()
        if self.hub or is_url(self.path) or not path.exists():
            return None
        return str(path if path.is_dir() else path.parent)


def is_url(path: str) -> bool:
    """Whether a path is one of an object store, or another that fsspec opens."""
    return URL.match(path) is not None


def open_source(source: DataSource, *, streaming: bool = False) -> Records:
    """Opens a source lazily, with `streaming` where it is if possible. Raises UserError as `open_path` and readers."""
    if source.path.startswith(GYM):
        return open_gym(source.path.removeprefix(GYM), source.path, source.options)
    if source.options:
        raise UserError(
            "options are those of a task of reasoning-gym, and this is none",
            where=source.path,
            fix=f"leave options out, or give {GYM}TASK",
        )
    if is_url(source.path):
        return open_url(source.path, source.split, streaming=streaming)
    path = pathlib.Path(source.path).expanduser()
    if path.exists() and not source.hub:
        return open_path(path, source.path, split=source.split)
    return _open_remote(source, path, streaming=streaming)


def _open_remote(source: DataSource, path: pathlib.Path, *, streaming: bool) -> Records:
    """Opens a data set of a hub. Raises UserError for a path that is no id of one."""
    repository = None if source.hub else modelscope_id(source.path)
    if repository is not None:
        return open_modelscope(
            repository, subset=source.subset, split=source.split, revision=source.revision, folder=source.folder
        )
    if source.hub or _may_be_hub_id(source.path):
        return open_hub(
            source.path,
            subset=source.subset,
            split=source.split,
            revision=source.revision,
            folder=source.folder,
            streaming=streaming,
        )
    return open_path(path, source.path, split=source.split)


def open_path(path: pathlib.Path, name: str, *, split: str = "train") -> Records:
    """Opens a file or folder; `name` is what the user called it.

    Raises UserError for a path that does not exist (suggesting similar names), an unsupported type of file, an empty
    folder, and as the reader of the type does.
    """
    if path.is_dir():
        return _open_folder(path, name, split)
    return _reader(path, name)(path, name)


def check_source_path(path: str) -> None:
    """Raises UserError, without reading a file, for a path that is neither a file of a type that is read, a folder nor
    perhaps the id of a data set on a hub."""
    if path.startswith(GYM) or is_url(path):
        return
    local = pathlib.Path(path).expanduser()
    missing = not local.exists()
    if not local.is_dir() and not (missing and (modelscope_id(path) is not None or _may_be_hub_id(path))):
        _reader(local, path)


def _reader(path: pathlib.Path, name: str) -> Callable[[pathlib.Path, str], Records]:
    """The reader of a file. Raises UserError if there is no such file, or nothing reads its type."""
    suffix = file_type(path)
    if not path.is_file() or suffix not in READERS:
        raise _path_error(path, name, suffix)
    return READERS[suffix]


def _path_error(path: pathlib.Path, name: str, suffix: str) -> UserError:
    if not path.exists():
        return missing_path_error(path, name)
    if not path.is_file():
        return UserError("this is neither a file nor a folder", where=name, fix="give a file or a folder of files")
    extension = f"'{suffix}'" if suffix else "no extension"
    unpack = f"unpack it, with {COMPRESSED[suffix]}; " if suffix in COMPRESSED else ""
    problem = f"cannot read this type of file ({extension})"
    return UserError(problem, where=name, fix=f"{unpack}supported: {SUPPORTED}")


def file_type(path: pathlib.Path) -> str:
    """The extension, in lower case, that selects the reader: the one before .gz or .zst for a type that may have it."""
    suffix = path.suffix.lower()
    inner = pathlib.Path(path.stem).suffix.lower()
    return inner if suffix in PACKED and inner in COMPRESSIBLE else suffix


def _open_folder(path: pathlib.Path, name: str, split: str) -> Records:
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return open_saved(path, name, split)
    files = [
        file
        for file in sorted(path.iterdir())
        # Hidden files, README.md and LICENSE are not data.
        if file.is_file() and not file.name.startswith(".") and file.suffix.lower() not in ("", ".md")
    ]
    if not files:
        folders = sorted(child.name for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))
        hint = f"; it contains the folders {', '.join(folders[:5])}" if folders else ""
        raise UserError(
            f"the folder contains no data files{hint}", where=name, fix=f"give a file, or a folder of: {SUPPORTED}"
        )
    by_type: dict[str, list[str]] = {}
    for file in files:
        by_type.setdefault(file_type(file), []).append(file.name)
    unsupported = sorted(set(by_type) - set(READERS))
    if unsupported:
        raise UserError(
            f"the folder contains a file that cannot be read: {by_type[unsupported[0]][0]}",
            where=name,
            fix=f"name the file you mean, or move the others elsewhere; supported: {SUPPORTED}",
        )
    parts = [open_path(file, f"{name.rstrip('/')}/{file.name}") for file in files]
    return ConcatenatedRecords(parts, path)


def _may_be_hub_id(name: str) -> bool:
    """Whether a missing path may be a hub id: `owner/name` or `name`, unless it has the extension of a data file, lies
    in a local folder, or resembles a local name."""
    path = pathlib.Path(name)
    if not HUB_ID.fullmatch(name) or file_type(path) in (*READERS, *PACKED):
        return False
    if len(path.parts) == 2:
        return not pathlib.Path(path.parts[0]).is_dir()
    return not _similar_names(path)


def _similar_names(path: pathlib.Path) -> list[str]:
    """Names in the missing path's folder that resemble it."""
    if not path.parent.is_dir():
        return []
    names = [child.name for child in path.parent.iterdir()]
    similar = difflib.get_close_matches(path.name, names, n=3, cutoff=0.6)
    return similar or [name for name in sorted(names) if pathlib.Path(name).stem == path.stem][:3]


def missing_path_error(path: pathlib.Path, name: str) -> UserError:
    """The error for a path that does not exist, with similar names or the nearest folder that exists."""
    similar = [str(pathlib.Path(name).parent / candidate) for candidate in _similar_names(path)]
    if similar:
        return UserError("no such file or folder", where=name, fix=f"did you mean {' or '.join(similar)}?")
    parent = path.parent
    while not parent.exists():
        parent = parent.parent
    if parent != path.parent:
        return UserError(
            f"no such file or folder: its folder {path.parent} does not exist either",
            where=name,
            fix=f"the nearest folder that exists is {parent.resolve()}",
        )
    return UserError(
        "no such file or folder", where=name, fix=f"check the name; it was looked for in {parent.resolve()}"
    )
