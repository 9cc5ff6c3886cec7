"""Functions that are called by the names of their modules, because a room above or only some recipes need them.

Each module is imported when its function is first called: a run without an evaluation or a push imports neither.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any


@dataclasses.dataclass(frozen=True)
class Hook:
    """A function as "module:name"; calling it imports the module."""

    target: str

    def load(self) -> Any:
        """Imports the module and returns the function."""
        module, _, name = self.target.partition(":")
        return getattr(importlib.import_module(module), name)

    def __call__(self, *arguments: Any) -> Any:
        return self.load()(*arguments)


@dataclasses.dataclass(frozen=True)
class SectionHooks:
    """Functions that a section of a recipe adds to a run. All processes of the job call them.

    `check(recipe, job)` comes before anything is read. `start(run)` comes before the weights are loaded. `on_save(run)`
    returns an object whose `saved(trainable, step)` is called after each save, and whose `close()` is called when
    training has ended. `finish(recipe, console, job)` comes when the result of a complete run is written.
    """

    check: Hook
    finish: Hook
    start: Hook | None = None
    on_save: Hook | None = None


# By section of the recipe, in the order in which they are called; a recipe without the section calls none of them.
SECTIONS = {
    "evaluate": SectionHooks(
        check=Hook("meshtune.evaluate.run:check_evaluation"),
        finish=Hook("meshtune.evaluate.run:evaluate_run"),
    ),
    "hub": SectionHooks(
        check=Hook("meshtune.train.pushing:check_hub"),
        start=Hook("meshtune.train.pushing:check_base"),
        on_save=Hook("meshtune.train.pushing:Pusher"),
        finish=Hook("meshtune.train.pushing:push_result"),
    ),
}

# write_state(run, step) writes the state after an update as a result, for paths such as RUN@STEP; returns its folder.
WRITE_STATE = Hook("meshtune.train.result.states:write_state")
