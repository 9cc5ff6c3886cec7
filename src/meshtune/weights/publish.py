"""Writes a directory or a file under another name until it is whole, so that readers never see half of it. Drafts are
locked, so that they are known from those that a killed process has left.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import pathlib
import shutil
from collections.abc import Iterator

from meshtune.errors import UserError
from meshtune.mesh.processes import SINGLE_PROCESS, Job, raise_collectively


@contextlib.contextmanager
def lock(draft: pathlib.Path) -> Iterator[None]:
    """Marks a file or folder that is being written. The operating system takes the mark away with the process, whatever
    ends it; clocks play no part."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # the file system has no locks
            handle = os.open(draft, os.O_RDONLY)
            stack.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


def is_locked(draft: pathlib.Path) -> bool:
    """Whether a process that runs writes `draft`, or this cannot be known."""
    try:
        handle = os.open(draft, os.O_RDONLY)
    except OSError:
        return draft.exists()
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


MARGIN = 1 << 20  # bytes beside those of the tensors


@contextlib.contextmanager
def publish_directory(dest: pathlib.Path, mark: str, job: Job = SINGLE_PROCESS) -> Iterator[pathlib.Path]:
    """Gives a new directory next to `dest` to write into, and renames it to `dest` when the block ends well.

    A `dest` that holds the file `mark` is of the same kind, and is replaced. Every process of `job` is given the same
    directory; process 0 makes, renames and removes it, when all have reached the end of the block. Each sees to it that
    its own files are on disk. Raises UserError, on every process, where `dest` holds something else, or where it cannot
    be written.
    """
    number = job.broadcast("publish: number", os.getpid())
    partial, old = (dest.with_name(f".{dest.name}.{suffix}-{number}") for suffix in ("partial", "old"))
    locked = contextlib.ExitStack()
    try:
        with raise_collectively(job, "publish: begin"), disk_errors(dest):
            if job.is_main_process:
                remove_leftovers(dest)
                _check(dest, mark)
                partial.mkdir(parents=True)
                locked.enter_context(lock(partial))
        with raise_collectively(job, "publish: shared"):
            if not partial.is_dir():
                raise UserError(
                    f"host {job.host} does not see what process 0 writes: the output is not on storage that all share",
                    where=str(partial),
                    fix="give an output on a shared file system, mounted at the same path on every host",
                )
        with disk_errors(dest):
            yield partial
        with raise_collectively(job, "publish: end"), disk_errors(dest):
            if job.is_main_process:
                for file in partial.iterdir():
                    _to_disk(file)
                if dest.exists():
                    dest.rename(old)
                partial.rename(dest)
                _to_disk(dest.parent)
    finally:
        locked.close()
        if job.is_main_process:
            if old.exists() and not dest.exists():
                old.rename(dest)
            shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)


def remove_leftovers(dest: pathlib.Path) -> None:
    """Removes what killed processes have left next to `dest`, and brings back a `dest` that one was replacing.

    Raises: OSError.
    """
    for old in dest.parent.glob(f".{glob.escape(dest.name)}.old-*"):
        if not dest.exists():
            old.rename(dest)
        elif not is_locked(old):
            shutil.rmtree(old, ignore_errors=True)
    for partial in dest.parent.glob(f".{glob.escape(dest.name)}.partial-*"):
        if not is_locked(partial):
            shutil.rmtree(partial) if partial.is_dir() else partial.unlink()


@contextlib.contextmanager
def new_file(partial: pathlib.Path, dest: pathlib.Path) -> Iterator[None]:
    """Creates the file `partial`, which is to be renamed to `dest`, and locks it. Raises: OSError."""
    dest.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(dest)
    partial.touch()
    with lock(partial):
        yield


def _check(dest: pathlib.Path, mark: str) -> None:
    if dest.is_file() or (dest.is_dir() and any(dest.iterdir()) and not (dest / mark).exists()):
        raise UserError(
            f"{dest} exists and is not what was to be written there (it has no {mark})",
            where=str(dest),
            fix="give another directory, or move this one aside",
        )


@contextlib.contextmanager
def disk_errors(dest: pathlib.Path) -> Iterator[None]:
    """Turns errors of the disk while `dest` is written into UserErrors."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {dest}: {error.strerror or error}",
            where=str(error.filename or dest),
            fix="make room, or give a directory that can be written",
        ) from error


def _to_disk(path: pathlib.Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_room(dest: pathlib.Path, nbytes: int) -> None:
    """Raises UserError where the disk that `dest` is to be on has no room for this many bytes."""
    parent = next(path for path in dest.absolute().parents if path.is_dir())
    need, free = nbytes + MARGIN, shutil.disk_usage(parent).free
    if need > free:
        raise UserError(
            f"not enough room on the disk: the export needs {need / 1e9:.2f} GB, {free / 1e9:.2f} GB are free",
            where=str(parent),
            fix="make room, or export to another disk",
        )
