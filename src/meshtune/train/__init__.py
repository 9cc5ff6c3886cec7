"""The training loop and what surrounds it. The package can be called: `meshtune.train(recipe)` runs a recipe."""

from __future__ import annotations

import sys
import types
from typing import Any


class _Training(types.ModuleType):
    """`meshtune.train` names this package, whoever imported it first, and is also the API's verb."""

    def __call__(self, recipe: Any, *overrides: str) -> Any:
        from meshtune.api import train

        return train(recipe, *overrides)


sys.modules[__name__].__class__ = _Training
