"""Who answers for a target: its platform's compiler where that is installed, else the estimate, with the reason."""

from __future__ import annotations

from collections.abc import Callable

from meshtune.config.recipe import Recipe
from meshtune.plan.compilers import compiled
from meshtune.plan.compilers.compiled import Compiled
from meshtune.plan.compilers.find import Missing, look
from meshtune.plan.compilers.process import Progress
from meshtune.plan.hardware import Target

Compiles = Callable[[Recipe, Target], Compiled]


def compiler_for(target: Target, progress: Progress | None = None) -> tuple[Compiles | None, str]:
    """(what compiles for a target, "") or (None, why there is nothing that does and how to get it)."""
    answer = look(target.device.platform)
    if isinstance(answer, Missing):
        return None, f"{answer.reason}: {answer.fix}"

    def ask(recipe: Recipe, target: Target) -> Compiled:
        whole = Recipe.model_validate(recipe.model_dump(mode="json"))
        return compiled(whole, target, progress=progress)

    return ask, ""
