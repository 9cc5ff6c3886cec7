"""Functions of rooms above training that it calls for some recipes only (an evaluation, a push)."""

from __future__ import annotations

import dataclasses

from meshtune.lazy import LazyFunction


@dataclasses.dataclass(frozen=True)
class SectionHooks:
    """Functions that a section of a recipe adds to a run. All processes of the job call them.

    `check(recipe, job)` comes before anything is read. `start(run)` comes before the weights are loaded. `on_save(run)`
    returns an object whose `saved(trainable, step)` is called after each save, and whose `close()` is called when
    training has ended. `finish(recipe, console, job)` comes when the result of a complete run is written.
    """

    check: LazyFunction | None = None
    finish: LazyFunction | None = None
    start: LazyFunction | None = None
    on_save: LazyFunction | None = None


# By section of the recipe, in the order in which they are called; a recipe without the section calls none of them.
SECTIONS = {
    "rollout": SectionHooks(on_save=LazyFunction("meshtune.train.online:OldRollouts")),
    "evaluate": SectionHooks(
        check=LazyFunction("meshtune.evaluate.run:check_evaluation"),
        finish=LazyFunction("meshtune.evaluate.run:evaluate_run"),
    ),
    "hub": SectionHooks(
        check=LazyFunction("meshtune.train.pushing:check_hub"),
        start=LazyFunction("meshtune.train.pushing:check_base"),
        on_save=LazyFunction("meshtune.train.pushing:Pusher"),
        finish=LazyFunction("meshtune.train.pushing:push_result"),
    ),
}

# write_state(run, step) writes the state after an update as a result, for paths such as RUN@STEP; returns its folder.
WRITE_STATE = LazyFunction("meshtune.train.result.states:write_state")
