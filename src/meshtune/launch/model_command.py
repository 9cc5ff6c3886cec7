"""A command that uses a model in several processes, as `meshtune launch local` runs it."""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile

VERBS = ("serve", "generate", "predict", "eval")  # chat reads a terminal, which the processes do not have


@dataclasses.dataclass(frozen=True)
class ModelCommand:
    """The `command_line` after the program, the verb first, and the directory with one log file for each process."""

    command_line: tuple[str, ...]
    logs: pathlib.Path


def model_command(command_line: list[str]) -> ModelCommand | None:
    """The command where `command_line` begins with one of VERBS; None for a recipe. A file of that name is ./NAME."""
    if command_line[0] not in VERBS:
        return None
    return ModelCommand(tuple(command_line), pathlib.Path(tempfile.mkdtemp(prefix=f"meshtune-{command_line[0]}-")))
