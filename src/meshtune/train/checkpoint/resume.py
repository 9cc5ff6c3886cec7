"""The checkpoint that a resumed run continues from, once it is certain that it is the same run."""

from __future__ import annotations

import dataclasses

from meshtune.digests import DamagedError
from meshtune.errors import UserError
from meshtune.train.checkpoint.changes import check_changes
from meshtune.train.checkpoint.checkpoints import Best, Checkpoints, Record

COMMANDS = ("resume", "overwrite", "accept_changes")  # keys that say how to start, and are no part of the run


@dataclasses.dataclass(frozen=True)
class Resumed:
    """The newest undamaged checkpoint; `notes` are messages about what differs without hindering the run."""

    step: int
    best: Best | None
    stale: int
    notes: list[str]


def find_resume(checkpoints: Checkpoints, current: Record) -> Resumed | None:
    """The checkpoint to continue from, or None if none was saved yet. `current` is the record of the run as requested.

    Newer checkpoints that are damaged are moved aside. All processes of the job call this.

    Raises: UserError if the recipe, the base model or the data are not those the run was started with, or if every
    checkpoint is damaged.
    """
    if not checkpoints.steps():
        return None
    step, damage, notes = _newest_undamaged(checkpoints)
    saved = checkpoints.record(step)
    changed = check_changes(saved.recipe, current.recipe)
    if saved.base_hash != current.base_hash:
        raise UserError(
            f"the base model is not the one this run was started with: {saved.base_hash} then, {current.base_hash} now",
            where=current.base_path,
            fix=f"give the model that was at {saved.base_path}, or start anew with overwrite=true",
        )
    if saved.data != current.data:
        raise UserError(
            "the training data are not those of the run: records, tokenizer, template or data options differ",
            where=str(checkpoints.path(step)),
            fix="put the data back to go on, or start anew with overwrite=true",
        )
    for damaged_step, error in damage.items():
        target = checkpoints.set_aside(damaged_step)
        notes.append(f"the checkpoint of update {damaged_step} is not used: {error.what}; it is now in {target}")
    notes += [f"changed: {change}" for change in changed if change.key not in COMMANDS]
    for name, version in saved.versions.items():
        current_version = current.versions.get(name)
        if current_version != version:
            notes.append(f"{name} was {version} and is {current_version}: from here on the last bits may differ")
    return Resumed(step, saved.best, saved.stale, notes)


def _newest_undamaged(checkpoints: Checkpoints) -> tuple[int, dict[int, DamagedError], list[str]]:
    """(its step, the errors of newer checkpoints, notes). Raises: UserError where every checkpoint is damaged."""
    damage: dict[int, DamagedError] = {}
    for step in reversed(checkpoints.steps()):
        try:
            has_digests = checkpoints.verify(step)
        except DamagedError as error:
            damage[step] = error
            continue
        notes = [
            f"{name} of the checkpoint of update {step} is damaged: it is not what Orbax wrote; nothing is read from it"
            for name in checkpoints.damaged_markers(step)
        ]
        if not has_digests:
            notes.append(
                f"the checkpoint of update {step} is of a version that wrote no digests: it was read unchecked"
            )
        return step, damage, notes
    listed = "; ".join(f"update {step}: {error.what}" for step, error in damage.items())
    raise UserError(
        f"no checkpoint of this run is whole: {listed}",
        where=str(checkpoints.directory),
        fix="put back a copy of the directory if you have one, or start anew with overwrite=true",
    )
