"""The Python API: `load` a model, `train` a recipe. `import meshtune` alone imports neither JAX nor pydantic."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from meshtune.generate.api import Model, load

if TYPE_CHECKING:
    from meshtune.config.recipe import Recipe
    from meshtune.train.result.result import Result

__all__ = ["Model", "load", "train"]


def train(recipe: Recipe | str | os.PathLike[str] | dict[str, object], *overrides: str) -> Result:
    """Runs a recipe (a Recipe, a YAML file, a mapping), with "key.sub=value" overrides; gives train.run's Result.

    As one of several processes (see docs/launch.md) it finds the others; nothing of JAX may have been used before.
    Raises UserError for whatever is wrong with the recipe, the model or the data, before the first step.
    """
    from meshtune.config.load import load_recipe
    from meshtune.mesh.processes import start
    from meshtune.train.run import train as run

    if isinstance(recipe, os.PathLike):
        recipe = os.fspath(recipe)
    with start() as job:
        return run(load_recipe(recipe, overrides), job=job)
