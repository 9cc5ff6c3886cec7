"""The mesh that a run was tuned on, for using its result on the same devices."""

from __future__ import annotations

import dataclasses
import os

from meshtune.config.load import load_recipe
from meshtune.errors import UserError
from meshtune.mesh.config import MeshConfig
from meshtune.runs.output import is_run
from meshtune.runs.states import split_state


def run_mesh(path: str | os.PathLike[str]) -> MeshConfig:
    """The mesh of the run at `path` for a model that generates: the devices of cp, which splits the sequences of
    training, go to fsdp, which splits parameters alike.

    Raises UserError where `path` is no run with a recipe, or its recipe leaves the mesh open.
    """
    directory, _ = split_state(path)
    if not (is_run(directory) and (directory / "recipe.yaml").is_file()):
        raise UserError(
            "only a run says which mesh it was tuned on, and this is none",
            where=str(path),
            fix="give the axes, such as mesh.tp=2",
        )
    recipe = load_recipe(str(directory / "recipe.yaml"))
    if recipe.mesh == "auto":
        raise UserError(
            "the run has not chosen its mesh yet", where=str(directory / "recipe.yaml"), fix="give it, as in mesh.tp=2"
        )
    joined = -1 if -1 in (recipe.mesh.fsdp, recipe.mesh.cp) else recipe.mesh.fsdp * recipe.mesh.cp
    return dataclasses.replace(recipe.mesh, fsdp=joined, cp=1)
