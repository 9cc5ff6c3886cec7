"""A training run: {"recipe": YAML, "resume": bool, "overwrite": bool}, with `devices` or `slurm`."""

from __future__ import annotations

from typing import Any

from meshtune.board.job import RECIPE
from meshtune.board.kinds.prepared import Prepared
from meshtune.board.paths import checked_recipe
from meshtune.board.slurm import SCRIPT, checked_options
from meshtune.board.workspace import Workspace
from meshtune.errors import UserError
from meshtune.runs.output import check_output


def prepare_train(workspace: Workspace, body: dict[str, Any]) -> Prepared:
    """The command that runs a recipe. Raises: UserError (config.problems.RecipeError for keys that are wrong)."""
    text = body.get("recipe")
    if not isinstance(text, str) or not text.strip():
        raise UserError("the recipe is missing", where="recipe", fix="send a recipe as YAML text")
    resume, overwrite = bool(body.get("resume")), bool(body.get("overwrite"))
    recipe = checked_recipe(workspace, text)
    output = workspace.to_write(recipe.output, "output")
    check_output(output, resume=resume or recipe.resume, overwrite=overwrite or recipe.overwrite)
    if overwrite and body.get("slurm"):
        raise UserError(
            "a run under Slurm is restarted, and would move its own work aside", where="overwrite", fix="leave it out"
        )
    flags = ["resume=true"] * resume if body.get("slurm") else [*["--resume"] * resume, *["--overwrite"] * overwrite]
    return Prepared(output.name, train_command(body, flags), output=str(output), recipe=text)


def train_command(body: dict[str, Any], options: list[str]) -> tuple[str, ...]:
    """The arguments that train by the recipe of a job, where `body` says: here, in processes, or under Slurm."""
    recipe = f"{{job}}/{RECIPE}"
    if body.get("slurm"):
        resources = checked_options(body["slurm"])
        return ("launch", "slurm", recipe, *options, *resources, "--out", f"{{job}}/{SCRIPT}", "--submit")
    devices = body.get("devices") or {}
    processes = devices.get("processes", 1) if isinstance(devices, dict) else 1
    verb = ["launch", "local", "-n", str(processes)] if type(processes) is int and processes > 1 else ["train"]
    return (*verb, recipe, *options)
