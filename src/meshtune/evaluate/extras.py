"""Packages that only evaluation needs: imported when they are used, with an error that says how to install them."""

from __future__ import annotations

import importlib
from types import ModuleType

from meshtune.errors import UserError, pip_install

FIX = pip_install("evaluate")


def optional(module: str, purpose: str, *, otherwise: str = "") -> ModuleType:
    """The module of this name. Raises UserError where its package is not installed; `otherwise` is another way out."""
    try:
        return importlib.import_module(module)
    except ImportError as problem:
        package = (problem.name or module).partition(".")[0]
        raise UserError(
            f"{purpose} needs the package {package}", fix=f"{FIX}{f', or {otherwise}' if otherwise else ''}"
        ) from problem
