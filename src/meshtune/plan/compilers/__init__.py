"""XLA's compilers for accelerators that are not present, each run in a separate process."""

from __future__ import annotations

from meshtune.plan.compilers.compile import ROLES, Compiled, compile_recipe
from meshtune.plan.compilers.find import Compiler, MissingCompiler, find_compiler, require_compiler

__all__ = ["ROLES", "Compiled", "Compiler", "MissingCompiler", "compile_recipe", "find_compiler", "require_compiler"]
