"""Meshtune: fine-tune open LLMs on JAX/XLA.

`load`, `train` and `Recipe` are found on first use, so that `import meshtune` alone imports neither JAX nor pydantic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshtune import train
    from meshtune.config.recipe import Recipe
    from meshtune.errors import UserError
    from meshtune.generate.api import Model, load

__all__ = ["Model", "Recipe", "UserError", "__version__", "load", "train"]

_HOMES = {
    "Model": "meshtune.generate.api",
    "Recipe": "meshtune.config.recipe",
    "UserError": "meshtune.errors",
    "load": "meshtune.generate.api",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name == "train":  # a package that can also be called: see meshtune/train/__init__.py
        return importlib.import_module("meshtune.train")
    if name == "__version__":
        import importlib.metadata

        return importlib.metadata.version("meshtune")
    raise AttributeError(f"module 'meshtune' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
