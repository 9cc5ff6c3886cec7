"""Runs on disk: their folders, their results and states, and what is exported of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pathlib

# Writes the state of a run after an update as a result, and returns its directory. What makes a result of a checkpoint
# is in rooms above this one, so the package sets it (meshtune/__init__.py).
write_state: Callable[[pathlib.Path, int], pathlib.Path] | None = None
