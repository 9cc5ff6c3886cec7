"""Where a resumed run goes on, once it is sure that it is the same run."""

from __future__ import annotations

import dataclasses

from meshtune.errors import UserError
from meshtune.train.checkpoint.changes import check_changes
from meshtune.train.checkpoint.checkpoints import Best, Checkpoints, Record


@dataclasses.dataclass(frozen=True)
class Resumed:
    """The newest whole checkpoint; `notes` say what differs without hindering."""

    step: int
    best: Best | None
    stale: int
    notes: list[str]


def find_resume(checkpoints: Checkpoints, now: Record) -> Resumed | None:
    """The checkpoint to go on from, or None if none was saved yet. `now` is the record of the run as it is asked for.

    Raises: UserError if the recipe, the base model or the data are not those the run was started with.
    """
    step = checkpoints.latest()
    if step is None:
        return None
    saved = checkpoints.record(step)
    changed = check_changes(saved.recipe, now.recipe)
    if saved.base_hash != now.base_hash:
        raise UserError(
            f"the base model is not the one this run was started with: {saved.base_hash} then, {now.base_hash} now",
            where=now.base_path,
            fix=f"give the model that was at {saved.base_path}, or start anew with overwrite=true",
        )
    if saved.data != now.data:
        raise UserError(
            "the training data are not those of the run: records, tokenizer, template or data options differ",
            where=str(checkpoints.path(step)),
            fix="put the data back to go on, or start anew with overwrite=true",
        )
    notes = [f"changed: {change}" for change in changed if change.key not in ("resume", "overwrite")]
    for name, version in saved.versions.items():
        if now.versions.get(name) != version:
            here = now.versions.get(name)
            notes.append(f"{name} was {version} and is {here}: from here on the last bits of numbers may differ")
    return Resumed(step, saved.best, saved.stale, notes)
