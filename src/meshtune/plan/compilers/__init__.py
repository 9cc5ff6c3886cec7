"""XLA's compilers for accelerators that are not here, each in a process of its own."""

from __future__ import annotations

from meshtune.plan.compilers.compiled import ROLES, Compiled
from meshtune.plan.compilers.find import Found, Missing, found_or_error, look
from meshtune.plan.compilers.results import compiled

__all__ = ["ROLES", "Compiled", "Found", "Missing", "compiled", "found_or_error", "look"]
