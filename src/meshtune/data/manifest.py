"""Manifests of prepared data sets: which stores a recipe's data are in, and which files they were made from.

A run whose manifest is there opens the stores, and does not read the files again, unless the size or the time of one
says that it may have changed. Then its digest decides.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from meshtune.data.checking import SkippedRecord
from meshtune.data.readers.textfiles import file_status
from meshtune.data.sources import is_url
from meshtune.data.store import Store, open_store, read_json, write_json
from meshtune.lazy import LazyFunction

read_pictures = LazyFunction("meshtune.data.pictures.expansion:read_pictures")
remote_status = LazyFunction("meshtune.data.readers.remote:remote_status")
FOLDER = "manifests"
_RECENT = 2_000_000_000  # nanoseconds: a file that was written just before may be written again within a clock's tick

Status = tuple[int, int, int]
"""Inode, size and time of the last change (readers.textfiles.file_status)."""


@dataclasses.dataclass(frozen=True)
class PreparedSet:
    """A prepared data set: the store of each split, the records that were skipped, and the fields that are not read."""

    stores: Mapping[str, Store]
    skipped: Sequence[SkippedRecord] = ()
    unread: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The manifest in `folder` of the data set that `facts`, a JSON object, describe: sources, options, template and
    tokenizer."""

    folder: pathlib.Path
    facts: Mapping[str, Any]

    @property
    def name(self) -> str:
        """A hash of the facts."""
        return hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()[:32]

    @property
    def file(self) -> pathlib.Path:
        return self.folder / FOLDER / f"{self.name}.json"

    def open(self) -> tuple[PreparedSet | None, list[str]]:
        """The prepared data set, None if there is none, if it is of other facts, or if a file or a store is not what it
        was; and the files that have changed."""
        try:
            content = read_json(self.file)
        except (OSError, ValueError):
            return None, []
        if content is None or content["facts"] != self.facts:
            return None, []
        # A set that was prepared elsewhere is opened without its files.
        checked = {
            path: recorded if "remote" in content and not _is_here(path) else _check_file(path, recorded)
            for path, recorded in content["files"].items()
        }
        changed = [path for path, recorded in checked.items() if recorded is None]
        if changed:
            return None, changed
        stores = {split: open_store(self.folder / key)[0] for split, key in content["stores"].items()}
        if None in stores.values():
            return None, []
        if checked != content["files"]:
            with contextlib.suppress(OSError):
                write_json(self.file, content | {"files": checked})
        skipped = [SkippedRecord(*item) for item in content["skipped"]]
        unread = {path: tuple(names) for path, names in content["unread"].items()}
        return PreparedSet({split: store for split, store in stores.items() if store}, skipped, unread), []

    def write(self, prepared: PreparedSet, files: Mapping[pathlib.Path | str, Status]) -> None:
        """Records a data set that was made from `files`. A disk that refuses is no error: the next run reads them
        again."""
        content = {
            "facts": self.facts,
            "files": {
                str(path): [status[1], _time_to_record(status[2]), file_digest(path, status)]
                for path, status in files.items()
            },
            "stores": {split: store.path.name for split, store in prepared.stores.items()},
            "skipped": [dataclasses.astuple(item) for item in prepared.skipped],
            "unread": prepared.unread,
        }
        with contextlib.suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.file, content)


def picture_statuses(stores: Iterable[Store]) -> dict[pathlib.Path | str, Status]:
    """The files of all pictures that the documents of stores have."""
    paths = {
        item.picture.path
        for store in stores
        for document in np.flatnonzero(store.column("extra_lengths")).tolist()
        for item in read_pictures(store[document].extra)
    }
    return {pathlib.Path(path): file_status(pathlib.Path(path)) for path in sorted(paths)}


def _time_to_record(changed: int) -> int:
    return 0 if abs(time.time_ns() - changed) < _RECENT else changed


def _is_here(name: str) -> bool:
    return is_url(name) or pathlib.Path(name).exists()


def _check_file(name: str, recorded: Sequence[Any]) -> list[Any] | None:
    """The size, time and digest to record of a file that was recorded with others; None if it has changed."""
    (size, changed, digest), path = recorded, pathlib.Path(name)
    status = remote_status(name) if is_url(name) else file_status(path)
    if status[1:] == (size, changed):
        return list(recorded)
    if not digest or (path.is_file() and status[1] != size) or file_digest(path, status) != digest:
        return None
    return [status[1], _time_to_record(status[2]), digest]


def file_digest(path: pathlib.Path | str, status: Status) -> str:
    """The SHA-256 of a file, or of the names in a folder; "" of an address, or if its status is another one by the
    end."""
    if isinstance(path, str):
        return ""
    try:
        if path.is_dir():
            digest = hashlib.sha256("\0".join(sorted(os.listdir(path))).encode()).hexdigest()
        else:
            with path.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError:
        return ""
    return digest if file_status(path) == status else ""
