"""Selects the source of a plan's figures: the target's compiler where it is installed, else the estimate."""

from __future__ import annotations

from collections.abc import Callable

from meshtune.config.recipe import Recipe
from meshtune.costs.hardware import Target
from meshtune.plan.compilers import compile_recipe
from meshtune.plan.compilers.compiled import Compiled
from meshtune.plan.compilers.find import MissingCompiler, find_compiler
from meshtune.plan.compilers.process import Progress

CompileStep = Callable[[Recipe, Target], Compiled]


def compiler_for(target: Target, progress: Progress | None = None) -> tuple[CompileStep | None, str]:
    """(a function that compiles a recipe's step for the target, ""), or (None, why there is none and how to get it)."""
    compiler = find_compiler(target.device.platform)
    if isinstance(compiler, MissingCompiler):
        return None, f"{compiler.reason}: {compiler.fix}"

    def compile_step(recipe: Recipe, target: Target) -> Compiled:
        validated = Recipe.model_validate(recipe.model_dump(mode="json"))
        return compile_recipe(validated, target, progress=progress)

    return compile_step, ""
