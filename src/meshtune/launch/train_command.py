"""The commands that a launcher runs; a recipe is validated before any file or process is created."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import shutil
import sys
import tempfile

from meshtune.config.load import load_recipe
from meshtune.config.recipe import Recipe
from meshtune.errors import UserError
from meshtune.runs.output import LOGS, check_output


@dataclasses.dataclass(frozen=True)
class TrainCommand:
    """`arguments` of `meshtune train`, and the `recipe` they resolve to."""

    arguments: tuple[str, ...]
    recipe: Recipe

    @property
    def command_line(self) -> tuple[str, ...]:
        """The command line, the verb first."""
        return ("train", *self.arguments)

    @property
    def output(self) -> pathlib.Path:
        """The run's directory."""
        return pathlib.Path(self.recipe.output).expanduser().absolute()

    @property
    def logs(self) -> pathlib.Path:
        """The directory with one log file for each process."""
        return self.output / LOGS

    @property
    def name(self) -> str:
        """The default name of the job: that of the output directory."""
        return self.output.name

    @property
    def recipe_file(self) -> pathlib.Path | None:
        return pathlib.Path(self.arguments[0]) if _is_file(self.arguments[0]) else None

    @property
    def overrides(self) -> tuple[str, ...]:
        """The arguments without the recipe file."""
        return self.arguments[1:] if self.recipe_file else self.arguments

    @property
    def input_files(self) -> list[pathlib.Path]:
        """Returns the recipe and the model if they are local files: every node must see them."""
        names = [str(self.recipe_file or ""), self.recipe.model.path]
        paths = [pathlib.Path(name).expanduser().absolute() for name in names if name]
        return [path for path in paths if path.exists()]


def parse_train_command(arguments: list[str]) -> TrainCommand:
    """Raises: UserError for an invalid recipe, as `meshtune train` would."""
    file, overrides = (arguments[0], arguments[1:]) if _is_file(arguments[0]) else (None, arguments)
    return TrainCommand(tuple(arguments), load_recipe(file, overrides))


def parse_restartable_command(arguments: list[str], *, output_is_visible: bool = True) -> TrainCommand:
    """The command for a job that a scheduler may restart: resume=true is added, which starts from the beginning in an
    empty output.

    `output_is_visible`: this machine sees the output directory at the same path as the job.
    Raises: UserError if the output is not empty and the arguments do not say resume=true, or if overwrite=true would
    move the run's own checkpoints aside at every restart.
    """
    command = parse_train_command(arguments)
    if command.recipe.overwrite:
        raise UserError(
            "overwrite=true would move the run's own work aside each time the scheduler restarts it",
            where=f"output {command.output}",
            fix="give another output, or move the old run away yourself",
        )
    if output_is_visible:
        check_output(command.output, resume=command.recipe.resume, overwrite=False)
    without_resume = [argument for argument in command.arguments if not argument.startswith("resume=")]
    return dataclasses.replace(command, arguments=(*without_resume, "resume=true"))


def _is_file(argument: str) -> bool:
    """Whether an argument is a recipe file: anything that cannot only be an override, as for `meshtune train`."""
    return "=" not in argument or os.path.exists(argument)


def meshtune_executable() -> str:
    """The `meshtune` command of this installation, as an absolute path."""
    sibling = pathlib.Path(sys.executable).with_name("meshtune")
    return str(sibling) if sibling.exists() else shutil.which("meshtune") or "meshtune"


def dns_label(name: str, max_length: int = 40) -> str:
    """`name` as a DNS label, which Kubernetes and SkyPilot require: lower-case letters, digits and dashes, first a
    letter."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:max_length].strip("-")
    return label if label[:1].isalpha() else f"run-{label}".strip("-")


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
