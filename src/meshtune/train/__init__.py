"""Training by a recipe. The package can be called: `meshtune.train(recipe)` runs one."""

from __future__ import annotations

import os
import sys
import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshtune.config.recipe import Recipe
    from meshtune.train.result.final import Result


class _Training(types.ModuleType):
    """`meshtune.train` names this package, whoever imported it first, and is also the API's verb."""

    def __call__(self, recipe: Recipe | str | os.PathLike[str] | dict[str, object], *overrides: str) -> Result:
        """Runs a recipe (a Recipe, a YAML file, a mapping), with "key.sub=value" overrides; returns train.run's Result.

        As one of several processes (see docs/launch.md) it finds the others; nothing of JAX may have been used before.
        Raises UserError for whatever is wrong with the recipe, the model or the data, before the first step.
        """
        from meshtune.config.load import load_recipe
        from meshtune.mesh.processes import start
        from meshtune.train.run import train

        if isinstance(recipe, os.PathLike):
            recipe = os.fspath(recipe)
        with start() as job:
            return train(load_recipe(recipe, overrides), job=job)


sys.modules[__name__].__class__ = _Training
