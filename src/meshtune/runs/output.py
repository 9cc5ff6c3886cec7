"""The output directory of a run: its lock, its checks before a run, and its files run.json and recipe.yaml."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from meshtune.digests import DamagedError, digest_json
from meshtune.errors import UNREADABLE, UserError
from meshtune.json_text import read_json

RUN, RECIPE, CHECKPOINTS, LOCK = "run.json", "recipe.yaml", "checkpoints", ".lock"
CONSOLE_LOG = "console.log"
ADAPTER, MODEL, BASE = "adapter", "model", "base"
DIGEST, RESULT_DIGEST = "digest", "result_digest"  # keys of run.json: of the rest of it, and of the result's files
LOGS = "logs"  # what the processes print, written by what launches them: before the run begins


def is_run(directory: pathlib.Path) -> bool:
    """Whether a directory is the output of `meshtune train`."""
    return any((directory / name).is_file() for name in (RECIPE, RUN))


def check_output(output: pathlib.Path, *, resume: bool, overwrite: bool) -> None:
    """Raises UserError if a run cannot or may not be written to `output`.

    Leaves nothing behind. A missing directory is created and removed again, because some file systems refuse names and
    locations that cannot be known in advance.
    """
    try:
        _check_creatable(output)
    except OSError as error:
        raise _unusable(output, error) from error
    names = _content(output)
    if not names or overwrite:
        return
    if not resume:
        raise UserError(
            f"the output directory is not empty: it holds {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}",
            where=str(output),
            fix="resume=true continues the run in it, overwrite=true moves it aside; or give another output",
        )
    if not any((output / name).exists() for name in (RUN, RECIPE, CHECKPOINTS)):
        raise UserError(
            f"there is no run to resume: the directory holds {', '.join(names[:4])}, but no {RUN}",
            where=str(output),
            fix="give the output of a run, or an empty or new directory",
        )


def _check_creatable(output: pathlib.Path) -> None:
    for path in (output, *output.absolute().parents):
        if path.is_symlink() and not path.exists():
            raise UserError(
                f"{path} is a symbolic link to {os.readlink(path)}, where nothing is",
                where=str(output),
                fix="remove the link or make the directory it leads to; or give another output",
            )
    if output.exists() and not output.is_dir():
        raise UserError("the output is a file, and must be a directory", where=str(output), fix="give another output")
    parent = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(
            "the output cannot be written: no permission, or its parent is a file",
            where=str(parent),
            fix="give another output, or make this directory writable",
        )
    if not output.exists():
        first = next(path for path in reversed((output, *output.absolute().parents)) if not path.exists())
        first.mkdir()
        first.rmdir()


def _unusable(output: pathlib.Path, error: OSError) -> UserError:
    return UserError(
        f"the output cannot be created: {error.strerror}",
        where=str(output),
        fix=UNREADABLE.get(error.errno or 0, "give an output on a file system where directories can be made"),
    )


@contextlib.contextmanager
def claim_output(output: pathlib.Path, *, overwrite: bool) -> Iterator[pathlib.Path | None]:
    """Locks `output` for this process. With `overwrite`, existing contents are first moved to another directory.

    Yields the directory that an earlier run was moved to, or None. The operating system releases the lock when the
    process ends. Raises: UserError if another process holds the lock.
    """
    output.mkdir(parents=True, exist_ok=True)
    aside = None
    with contextlib.ExitStack() as stack:
        stack.enter_context(_lock(output))
        if overwrite and _content(output):
            aside = _free_name(output)
            os.rename(output, aside)
            output.mkdir()
            if (aside / LOGS).is_dir():
                os.rename(aside / LOGS, output / LOGS)  # they are being written: a launch adds to them
            stack.enter_context(_lock(output))
        yield aside


def is_claimed(output: pathlib.Path) -> bool:
    """Whether a process holds the lock of `output`, as `claim_output` takes it."""
    try:
        with (output / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no run was ever here, or the file system has no locks
        return False
    return False


def write_run(output: pathlib.Path, fields: Mapping[str, object]) -> None:
    """Merges `fields` into run.json as one atomic replacement; a damaged run.json is replaced."""
    try:
        before = read_run(output)
    except DamagedError:
        before = {}
    merged = {**before, **fields}
    content = json.dumps({**merged, DIGEST: digest_json(merged)}, indent=2, ensure_ascii=False)
    _replace(output / RUN, content + "\n")


def read_run(output: pathlib.Path) -> dict[str, Any]:
    """Reads run.json, without its digest; {} if the file does not exist. Raises: DamagedError."""
    path = output / RUN
    if not path.exists():
        return {}
    try:
        fields = read_json(path)
        digest = fields.pop(DIGEST, None)  # earlier versions wrote none
        if digest not in (None, digest_json(fields)):
            raise ValueError("it does not have its digest")
        return fields
    except ValueError as error:
        raise DamagedError(
            f"{RUN} is damaged: it is not what was written",
            where=str(path),
            fix="resume the run, which writes it again, or give its adapter/ or model/ directly",
        ) from error


def write_recipe(output: pathlib.Path, recipe: Mapping[str, object]) -> None:
    """Writes recipe.yaml with all defaults, replacing the file atomically."""
    _replace(output / RECIPE, yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True))


def _replace(path: pathlib.Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.partial")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def _content(output: pathlib.Path) -> list[str]:
    """Lists the directory's entries except the lock, logs and partial files of a killed process."""
    if not output.is_dir():
        return []
    names = sorted(path.name for path in output.iterdir())
    return [name for name in names if name not in (LOCK, LOGS, CONSOLE_LOG) and not name.endswith(".partial")]


def _free_name(output: pathlib.Path) -> pathlib.Path:
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    base = output.absolute()
    names = [base.with_name(f"{base.name}.old-{stamp}{suffix}") for suffix in ("", *(f"-{n}" for n in range(2, 100)))]
    return next(name for name in names if not name.exists())


@contextlib.contextmanager
def _lock(output: pathlib.Path) -> Iterator[None]:
    with (output / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                "another process is writing to this output",
                where=str(output),
                fix="wait for that run, or give another output",
            ) from None
        yield
