"""The stage that a compiler process is in, reported through a file to the process that waits for it."""

from __future__ import annotations

import os
import pathlib

STAGE_VARIABLE = "MESHTUNE_STAGE"  # environment variable of the compiler process: the path of the file


def report_stage(stage: str) -> None:
    """Reports the current stage (such as "tracing"); does nothing outside of a process that `process.run` started."""
    if path := os.environ.get(STAGE_VARIABLE):
        scratch = pathlib.Path(path + ".new")
        scratch.write_text(stage, encoding="utf-8")
        scratch.replace(path)


def read_stage(path: pathlib.Path) -> str:
    """The stage last reported."""
    return path.read_text(encoding="utf-8") if path.is_file() else "starting"
