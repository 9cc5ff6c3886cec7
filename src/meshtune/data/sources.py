"""From what the recipe names to records: a file, a folder of files of one kind, or a data set of the hub.

Local .json, .jsonl, .csv, .tsv and .txt (also .gz) are read here, lazily, from an index of where each record begins;
.parquet, .arrow and hub data sets go through `datasets`, memory-mapped from its cache (HF_HOME). Nothing is unpickled
and no code of a data set is run.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import pathlib
import re
from collections.abc import Callable, Mapping

from meshtune.data.readers.columnar import open_arrow, open_hub, open_parquet, open_saved
from meshtune.data.readers.csvfile import CsvRecords
from meshtune.data.readers.jsonfile import JsonRecords
from meshtune.data.readers.records import Joined, Records
from meshtune.data.readers.textfile import TextRecords
from meshtune.errors import UserError

READERS: dict[str, Callable[[pathlib.Path, str], Records]] = {
    ".json": functools.partial(JsonRecords, lines=False),
    ".jsonl": functools.partial(JsonRecords, lines=True),
    ".csv": CsvRecords,
    ".tsv": functools.partial(CsvRecords, delimiter="\t"),
    ".txt": TextRecords,
    ".parquet": open_parquet,
    ".arrow": open_arrow,
}
PACKABLE = (".json", ".jsonl", ".csv", ".tsv", ".txt")  # also with .gz after it
SUPPORTED = f"{', '.join(READERS)}, and {', '.join(f'{kind}.gz' for kind in PACKABLE)}"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclasses.dataclass(frozen=True)
class Source:
    """A source as it is read, whether a recipe or a registry described it.

    `columns` maps a format's field to the record's; None says that the records have no such field. `sample` draws that
    many records by the seed (a registry's num_samples), `cap` takes the first ones. `hub` says that the path is an
    id of the Hugging Face hub.
    """

    path: str
    format: str = "auto"
    columns: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    tags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    folder: str | None = None
    weight: float | None = None
    cap: int | None = None
    sample: int | None = None
    hub: bool = False


def open_source(source: Source) -> Records:
    """The records of a source, lazily. UserError: see `open_path` and `readers.columnar.open_hub`."""
    path = pathlib.Path(source.path).expanduser()
    if source.hub or (not path.exists() and _may_be_hub_id(source.path)):
        return open_hub(
            source.path, subset=source.subset, split=source.split, revision=source.revision, folder=source.folder
        )
    return open_path(path, source.path, split=source.split)


def open_path(path: pathlib.Path, name: str, *, split: str = "train") -> Records:
    """The records of a file or folder; `name` is what the user called it.

    Raises UserError for a path that does not exist (with near names), a kind of file that is not supported, an empty
    folder or one that mixes kinds, and for what the reader of the kind finds.
    """
    if path.is_dir():
        return _open_folder(path, name, split)
    if not path.exists():
        raise missing(path, name)
    if not path.is_file():
        raise UserError("this is neither a file nor a folder", where=name, fix="give a file or a folder of files")
    kind = kind_of(path)
    if kind not in READERS:
        found = f"'{kind}'" if kind else "no extension"
        raise UserError(f"cannot read this kind of file ({found})", where=name, fix=f"supported: {SUPPORTED}")
    return READERS[kind](path, name)


def kind_of(path: pathlib.Path) -> str:
    """The extension in lower case that chooses the reader; the one before .gz for a kind that may be packed."""
    suffix = path.suffix.lower()
    inner = pathlib.Path(path.stem).suffix.lower()
    return inner if suffix == ".gz" and inner in PACKABLE else suffix


def _open_folder(path: pathlib.Path, name: str, split: str) -> Records:
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return open_saved(path, name, split)
    files = [
        file
        for file in sorted(path.iterdir())
        # Notes that lie beside data are no data: hidden files, README.md, LICENSE.
        if file.is_file() and not file.name.startswith(".") and file.suffix.lower() not in ("", ".md")
    ]
    kinds: dict[str, list[str]] = {}
    for file in files:
        kinds.setdefault(kind_of(file), []).append(file.name)
    if not files:
        folders = sorted(child.name for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))
        inside = f"; it holds the folders {', '.join(folders[:5])}" if folders else ""
        raise UserError(
            f"the folder holds no data files{inside}", where=name, fix=f"give a file, or a folder of: {SUPPORTED}"
        )
    other = sorted(set(kinds) - set(READERS))
    if other:
        raise UserError(
            f"the folder holds a kind of file that cannot be read: {kinds[other[0]][0]}",
            where=name,
            fix=f"name the file you mean, or move the others away; supported: {SUPPORTED}",
        )
    if len(kinds) > 1:
        listed = ", ".join(f"{kind} ({len(names)}, e.g. {names[0]})" for kind, names in sorted(kinds.items()))
        raise UserError(
            f"a file or a folder of files of one kind is expected, and this folder mixes kinds: {listed}",
            where=name,
            fix="name the files one by one in data.train",
        )
    parts = [open_path(file, f"{name.rstrip('/')}/{file.name}") for file in files]
    return parts[0] if len(parts) == 1 else Joined(parts)


def _may_be_hub_id(name: str) -> bool:
    """`owner/name` or `name`, unless it points into a folder that is here, ends like a file, or resembles one here."""
    path = pathlib.Path(name)
    if not HUB_ID.fullmatch(name) or kind_of(path) in (*READERS, ".gz"):
        return False
    if len(path.parts) == 2:
        return not pathlib.Path(path.parts[0]).is_dir()
    return not _near(path)


def _near(path: pathlib.Path) -> list[str]:
    """Names in the nearest folder that exists which resemble the missing one."""
    if not path.parent.is_dir():
        return []
    names = [child.name for child in path.parent.iterdir()]
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.6)
    return near or [name for name in sorted(names) if pathlib.Path(name).stem == path.stem][:3]


def missing(path: pathlib.Path, name: str) -> UserError:
    near = [str(pathlib.Path(name).parent / one) for one in _near(path)]
    if near:
        return UserError("no such file or folder", where=name, fix=f"did you mean {' or '.join(near)}?")
    parent = path.parent
    while not parent.exists():
        parent = parent.parent
    if parent != path.parent:
        return UserError(
            f"no such file or folder: already its folder {path.parent} does not exist",
            where=name,
            fix=f"the nearest folder that exists is {parent.resolve()}",
        )
    return UserError(
        "no such file or folder", where=name, fix=f"check the name; it is looked for in {parent.resolve()}"
    )
