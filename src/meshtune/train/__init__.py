"""The training loop and what surrounds it. The package can be called: `meshtune.train(recipe)` runs a recipe."""

from __future__ import annotations

import os
import sys
import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshtune.config.recipe import Recipe
    from meshtune.train.result.result import Result


class _Training(types.ModuleType):
    """`meshtune.train` names this package, whoever imported it first, and is also the API's verb."""

    def __call__(self, recipe: Recipe | str | os.PathLike[str] | dict[str, object], *overrides: str) -> Result:
        from meshtune.api import train

        return train(recipe, *overrides)


sys.modules[__name__].__class__ = _Training
