"""The output directory of a run, and checks that its files are those that were written."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import pathlib
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from meshtune.digests import (
    FILE,
    DamagedError,
    check_directory,
    damage_error,
    digest_files,
    digest_json,
    find_damage,
    read_digests,
    share,
)
from meshtune.errors import UNREADABLE, UserError
from meshtune.json_text import read_json
from meshtune.mesh.processes import Job
from meshtune.options import Shard

RUN, RECIPE, CHECKPOINTS, LOCK = "run.json", "recipe.yaml", "checkpoints", ".lock"
CONSOLE_LOG = "console.log"
ROLLOUTS = "rollouts.jsonl"
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
def claim_output(output: pathlib.Path, *, overwrite: bool, shard: Shard = Shard()) -> Iterator[pathlib.Path | None]:
    """Locks `output`, or a shard of it, for this process. With `overwrite`, its contents are first moved to another
    directory.

    Yields the directory that an earlier run was moved to, or None. The operating system releases the lock when the
    process ends. Raises: UserError if another process holds the lock.
    """
    output.mkdir(parents=True, exist_ok=True)
    aside = None
    with contextlib.ExitStack() as stack:
        stack.enter_context(_lock(output, shard))
        if overwrite and _content(output):
            aside = _free_name(output)
            os.rename(output, aside)
            output.mkdir()
            if (aside / LOGS).is_dir():
                os.rename(aside / LOGS, output / LOGS)  # they are being written: a launch adds to them
            stack.enter_context(_lock(output, shard))
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
    own = (LOGS, CONSOLE_LOG)
    return [name for name in names if name not in own and not name.startswith(LOCK) and not name.endswith(".partial")]


def _free_name(output: pathlib.Path) -> pathlib.Path:
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    base = output.absolute()
    names = [base.with_name(f"{base.name}.old-{stamp}{suffix}") for suffix in ("", *(f"-{n}" for n in range(2, 100)))]
    return next(name for name in names if not name.exists())


@contextlib.contextmanager
def _lock(output: pathlib.Path, shard: Shard) -> Iterator[None]:
    name, part = LOCK, "this output"
    if shard.count > 1:
        name, part = f"{LOCK}-{shard.index}-of-{shard.count}", f"shard {shard} of this output"
    with (output / name).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another process is writing to {part}",
                where=str(output),
                fix="wait for that run, or give another output",
            ) from None
        yield


HISTORY = ("metrics.jsonl", "samples.jsonl")


def branch(source: pathlib.Path, step: int, output: pathlib.Path) -> None:
    """Makes `output` a run that was stopped after update `step` of the run in `source`, from where resume=true
    continues.

    Checkpoints are linked where both are on one file system, else copied.

    Raises: UserError where there is no such checkpoint, or `output` is not empty.
    """
    checkpoint = source / CHECKPOINTS / str(step)
    if not checkpoint.is_dir():
        raise UserError(
            f"there is no checkpoint of update {step}", where=str(source), fix="look at its checkpoints folder"
        )
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError("the output is not empty", where=str(output), fix="give a new folder")
    draft = output.with_name(f".{output.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        (draft / CHECKPOINTS).mkdir(parents=True)
        shutil.copytree(checkpoint, draft / CHECKPOINTS / str(step), copy_function=link_or_copy)
        if (source / BASE).is_dir():
            shutil.copytree(source / BASE, draft / BASE, copy_function=link_or_copy)
        for name in (RUN, RECIPE, *HISTORY):  # these are written to, and so are copied
            if (source / name).is_file():
                shutil.copy2(source / name, draft / name)
        if output.exists():
            output.rmdir()
        os.rename(draft, output)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise UserError(
            f"the new run cannot be written: {error.strerror}", where=str(output), fix="make room, or give another one"
        ) from error


def link_or_copy(source: str, target: str) -> None:
    """Links a file under another name, or copies it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


FIX = f"make or copy it again; if you changed a file on purpose, delete {FILE} beside it"


def check_result(directory: Path, expected: str | None = None) -> None:
    """Raises DamagedError if a file of a model or adapter does not match its digest. Directories without digests pass.

    `expected` is the digest of digests.json itself, if the run recorded it.
    """
    hint = "" if expected is None else f", and give {directory} itself in place of its run"
    check_directory(directory, expected=expected, fix=FIX + hint)


def check_source(directory: Path, job: Job) -> None:
    """Verifies a directory that all processes of `job` read, like `check_result`; each process hashes a share of files.

    Raises: DamagedError, on all processes.
    """
    if damage := find_damage_collectively(directory, job):
        raise damage_error(directory, damage, FIX)


def find_damage_collectively(
    directory: Path, job: Job, *, required: bool = False, local: dict[str, str] | None = None
) -> dict[str, str]:
    """Finds the damaged files of a directory and the fault of each; each process of `job` hashes some of them.

    Every process gets the same result. A directory without digests counts as undamaged unless they are `required`.
    `local` is what `find_local_damage` has already found.
    """
    damage = find_local_damage(directory, job, required=required) if local is None else local
    return job.merge(f"digests of {directory.name}", damage)


def find_local_damage(directory: Path, job: Job, *, required: bool = False) -> dict[str, str]:
    """The damage of this process's share of a directory's files."""
    if not required and not (directory / FILE).exists():
        return {}
    try:
        digests, _ = read_digests(directory)
    except DamagedError as error:
        return {FILE: error.reason}
    return find_damage(directory, share(digests, job.process_index, job.process_count))


def weights_digests(directory: Path) -> list[str]:
    """Returns the digests of all bytes of a model's weight files, for keys of caches that are computed from them."""
    from meshtune.weights.safetensors_files import headers

    files = sorted({info.file for info in headers(directory).values()})
    return [digest_files(file.parent, [file.name])[file.name].digest for file in files]
