"""A new run that begins at a checkpoint of another one."""

from __future__ import annotations

import os
import pathlib
import shutil
import uuid

from meshtune.errors import UserError
from meshtune.runs.output import BASE, CHECKPOINTS, RECIPE, RUN

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
        shutil.copytree(checkpoint, draft / CHECKPOINTS / str(step), copy_function=_link)
        if (source / BASE).is_dir():
            shutil.copytree(source / BASE, draft / BASE, copy_function=_link)
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


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
