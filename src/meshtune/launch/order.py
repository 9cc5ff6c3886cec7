"""What is to be launched: a recipe with its overrides, known to be right before anything is written or started."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import shutil
import sys

from meshtune.config.load import load_recipe
from meshtune.config.recipe import Recipe
from meshtune.errors import UserError
from meshtune.runs.output import LOGS, check_output


@dataclasses.dataclass(frozen=True)
class Order:
    """`arguments` are those of `meshtune train`; `recipe` is what they say."""

    arguments: tuple[str, ...]
    recipe: Recipe

    @property
    def output(self) -> pathlib.Path:
        """The run's directory."""
        return pathlib.Path(self.recipe.output).expanduser().absolute()

    @property
    def logs(self) -> pathlib.Path:
        """Where the processes' output goes, a file each."""
        return self.output / LOGS

    @property
    def name(self) -> str:
        """A name for the job: the output's."""
        return self.output.name

    @property
    def file(self) -> pathlib.Path | None:
        """The recipe's file, if there is one."""
        return pathlib.Path(self.arguments[0]) if _is_file(self.arguments[0]) else None

    @property
    def overrides(self) -> tuple[str, ...]:
        """The arguments without the file."""
        return self.arguments[1:] if self.file else self.arguments

    @property
    def files(self) -> list[pathlib.Path]:
        """What must be visible where the run runs: recipe and model, as far as they are files here."""
        named = [str(self.file or ""), self.recipe.model.path]
        paths = [pathlib.Path(one).expanduser().absolute() for one in named if one]
        return [path for path in paths if path.exists()]


def order(arguments: list[str]) -> Order:
    """Raises UserError for a recipe that is not right, as `meshtune train` would."""
    first, *rest = arguments
    file, overrides = (first, rest) if _is_file(first) else (None, arguments)
    return Order(tuple(arguments), load_recipe(file, overrides))


def restartable(arguments: list[str], *, here: bool = True) -> Order:
    """The same for a job that a scheduler may start again: it resumes whenever there is something to resume.

    `here`: this machine sees the output as the job will.
    Raises: UserError if the output holds something already and resume=true does not say that it is to go on, or if
    overwrite=true would move the work aside at every restart.
    """
    found = order(arguments)
    if found.recipe.overwrite:
        raise UserError(
            "overwrite=true would move the run's own work aside each time the scheduler starts it again",
            where=f"output {found.output}",
            fix="give another output, or move the old run away yourself",
        )
    if here:
        check_output(found.output, resume=found.recipe.resume, overwrite=False)
    kept = [one for one in found.arguments if not one.startswith("resume=")]
    return dataclasses.replace(found, arguments=(*kept, "resume=true"))


def _is_file(argument: str) -> bool:
    """An argument is a recipe unless it can only be an override, as for `meshtune train`."""
    return "=" not in argument or os.path.exists(argument)


def program() -> str:
    """The command `meshtune` of this installation, as an absolute path."""
    beside = pathlib.Path(sys.executable).with_name("meshtune")
    return str(beside) if beside.exists() else shutil.which("meshtune") or "meshtune"


def label(name: str, longest: int = 40) -> str:
    """`name` as Kubernetes and SkyPilot take it: lower-case letters, digits and dashes, a letter first."""
    clean = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:longest].strip("-")
    return clean if clean[:1].isalpha() else f"run-{clean}".strip("-")
