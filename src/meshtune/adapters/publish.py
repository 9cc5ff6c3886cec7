"""A directory that appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator

from meshtune.errors import UserError


@contextlib.contextmanager
def published(dest: pathlib.Path, mark: str) -> Iterator[pathlib.Path]:
    """Gives a new directory beside `dest` to write into, and renames it to `dest` when the block ends well.

    A `dest` that holds the file `mark` is of the same kind, and is replaced. Raises UserError where `dest` holds
    something else, or where it cannot be written.
    """
    if dest.is_file() or (dest.is_dir() and any(dest.iterdir()) and not (dest / mark).exists()):
        raise UserError(
            f"{dest} exists and is not what was to be written there (it has no {mark})",
            where=str(dest),
            fix="give another directory, or move this one aside",
        )
    partial, old = (dest.with_name(f".{dest.name}.{what}-{os.getpid()}") for what in ("partial", "old"))
    try:
        partial.mkdir(parents=True)
        yield partial
        for file in partial.iterdir():
            _to_disk(file)
        if dest.exists():
            dest.rename(old)
        partial.rename(dest)
        _to_disk(dest.parent)
    except OSError as error:
        raise UserError(
            f"cannot write {dest}: {error.strerror or error}",
            where=str(error.filename or dest),
            fix="make room, or give a directory that can be written",
        ) from error
    finally:
        if old.exists() and not dest.exists():
            old.rename(dest)
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _to_disk(path: pathlib.Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
