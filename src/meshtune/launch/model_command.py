"""A command that uses a model in several processes, as `meshtune launch local` runs it."""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile

VERBS = ("serve", "generate", "predict")  # chat reads a terminal, which the processes do not have


@dataclasses.dataclass(frozen=True)
class ModelCommand:
    """`words` of the command line, the verb first, and the directory with one log file for each process."""

    words: tuple[str, ...]
    logs: pathlib.Path


def model_command(words: list[str]) -> ModelCommand | None:
    """The command where `words` begin with a verb of VERBS; None for a recipe. A file of that name is ./NAME."""
    if words[0] not in VERBS:
        return None
    return ModelCommand(tuple(words), pathlib.Path(tempfile.mkdtemp(prefix=f"meshtune-{words[0]}-")))
