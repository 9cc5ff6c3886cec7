"""A training run: {"recipe": YAML, "resume": bool, "overwrite": bool}, with `devices` or `slurm`."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from meshtune.board.kinds.prepared import Prepared
from meshtune.board.slurm import SCRIPT, checked_options
from meshtune.board.workspace import Workspace
from meshtune.config import yaml_text
from meshtune.config.foreign.detect import is_foreign
from meshtune.config.load import load_recipe, silent
from meshtune.config.recipe import Recipe
from meshtune.data.registry import Registry
from meshtune.errors import UserError
from meshtune.objectives.stages import STAGES
from meshtune.runs.output import check_output

NAME = "recipe.yaml"


def prepare(workspace: Workspace, body: dict[str, Any]) -> Prepared:
    """The command that runs a recipe. Raises: UserError (config.problems.RecipeError for keys that are wrong)."""
    text = body.get("recipe")
    if not isinstance(text, str) or not text.strip():
        raise UserError("the recipe is missing", where="recipe", fix="send a recipe as YAML text")
    resume, overwrite = bool(body.get("resume")), bool(body.get("overwrite"))
    recipe = checked_recipe(workspace, text)
    output = workspace.to_write(recipe.output, "output")
    if output == workspace.root or output.is_relative_to(workspace.folder):
        raise UserError("this folder is the board's own", where="output", fix="give a folder of its own, as runs/first")
    check_output(output, resume=resume or recipe.resume, overwrite=overwrite or recipe.overwrite)
    if overwrite and body.get("slurm"):
        raise UserError(
            "a run under Slurm is restarted, and would move its own work aside", where="overwrite", fix="leave it out"
        )
    flags = ["resume=true"] * resume if body.get("slurm") else [*["--resume"] * resume, *["--overwrite"] * overwrite]
    return Prepared(output.name, command(body, flags), output=str(output), recipe=text)


def command(body: dict[str, Any], options: list[str]) -> tuple[str, ...]:
    """The arguments that train by the recipe of a job, where `body` says: here, in processes, or under Slurm."""
    recipe = f"{{job}}/{NAME}"
    if body.get("slurm"):
        resources = checked_options(body["slurm"])
        return ("launch", "slurm", recipe, *options, *resources, "--out", f"{{job}}/{SCRIPT}", "--submit")
    devices = body.get("devices") or {}
    processes = devices.get("processes", 1) if isinstance(devices, dict) else 1
    verb = ["launch", "local", "-n", str(processes)] if type(processes) is int and processes > 1 else ["train"]
    return (*verb, recipe, *options)


def checked_recipe(workspace: Workspace, text: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a YAML text, whose local paths lie inside the workspace. Raises: UserError."""
    content = yaml_text.read(text, NAME).value
    if not isinstance(content, dict):
        raise UserError("a recipe is a mapping of keys to values", where=NAME, fix="start with `model: ...`")
    if (tool := is_foreign(content)) is not None:
        raise UserError(f"this is a recipe of {tool}", where=NAME, fix="import it")
    recipe = load_recipe(content, overrides, notify=silent)
    check_paths(workspace, recipe)
    return recipe


def check_paths(workspace: Workspace, recipe: Recipe) -> None:
    """Raises: UserError for a local path of a recipe, or of its registry, that lies outside the workspace."""
    for where, path in itertools.chain(_local_paths(recipe), _registered(workspace, recipe)):
        if path.startswith(("/", "~", ".")) or (workspace.root / path).exists():
            workspace.to_read(path, where)


def _registered(workspace: Workspace, recipe: Recipe) -> Iterator[tuple[str, str]]:
    """(key, path) of the files that entries of a registry lead to; wrong entries are refused by their reader."""
    for index, section in enumerate(recipe.data.train):
        if section.name is not None and recipe.data.registry is not None:
            with contextlib.suppress(UserError):
                registry = Registry.load(str(workspace.root / recipe.data.registry))
                source = registry.source(section, STAGES[recipe.stage.kind].dataset_type)
                yield f"data.train.{index}.name", source.path


def _local_paths(recipe: Recipe) -> list[tuple[str, str]]:
    """(key, value) of every path in a recipe that may be local."""
    model, data = recipe.model, recipe.data
    paths: list[tuple[str, str | None]] = [
        ("model.path", model.path),
        ("model.tokenizer", model.tokenizer),
        ("model.chat_template", model.chat_template),
        ("model.adapter", model.adapter),
        *(("model.merge_adapters", path) for path in model.merge_adapters),
        ("data.registry", data.registry),
        ("stage.reference", getattr(recipe.stage, "reference", None)),
    ]
    for split, sources in (("train", data.train), ("validation", data.validation)):
        if isinstance(sources, list):
            paths += [(f"data.{split}.{index}.path", source.path) for index, source in enumerate(sources)]
    if recipe.evaluate is not None:
        paths += [(f"evaluate.tasks.{name}", path) for name, path in recipe.evaluate.tasks.items()]
    return [(where, path) for where, path in paths if path]
