"""Finds the checkpoint to resume from, and compares its recipe with the one that is asked for."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping
from typing import Any

from meshtune.digests import DamagedError
from meshtune.errors import UserError
from meshtune.optim.optimizer import ENDLESS
from meshtune.train.checkpoint.checkpoints import Best, Checkpoints, Record

# Keys that decide what is written, shown or kept, and never what is learned. Bases and data are known by their content
# (hashes in the checkpoint), so the places they lie in may change.
FREE = (
    "output", "resume", "overwrite", "accept_changes", "log.*", "sample.*", "evaluate", "evaluate.*", "hub", "hub.*",
    "checkpoint.*",
    "model.path", "model.revision", "model.load", "model.tokenizer", "model.chat_template", "model.adapter", "data.*",
    "mesh", "mesh.*", "compute.memory_check", "rollout.rows", "train.hang_*",
)  # fmt: skip
# Not in the data's fingerprint, which is of documents and tokens: these decide how rows are made of them.
ROWS = ("data.packing", "data.shuffle", "data.max_length")
# Free as long as nothing is stopped early: evaluations then only look.
EVALUATION = ("eval.*", "data.validation")
LENGTH = ("train.steps", "train.epochs")


@dataclasses.dataclass(frozen=True)
class Change:
    """One key of the recipe whose value is not what it was."""

    key: str
    before: object
    after: object

    def __str__(self) -> str:
        return f"{self.key}: {self.before!r} -> {self.after!r}"


def changes(before: Mapping[str, object], after: Mapping[str, object]) -> list[Change]:
    """Differences between two recipes (as `model_dump(mode="json")`), by key, sorted."""
    old, new = _flat(before), _flat(after)
    return [
        Change(key, old.get(key), new.get(key))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def check_changes(before: Mapping[str, object], after: Mapping[str, object]) -> list[Change]:
    """The changes, if a resumed run may have them all: those that change the result need `accept_changes`.

    Raises: UserError that lists those it may not have, and those it may.
    """
    changed = changes(before, after)
    refused = [change for change in changed if not _is_allowed(change, before, after)]
    if refused and not after.get("accept_changes"):
        fine = [change for change in changed if change not in refused]
        raise UserError(
            "the recipe is not the one this run was started with: "
            + "; ".join(map(str, refused))
            + (f" (these changes are fine: {'; '.join(map(str, fine))})" if fine else ""),
            where=str(after["output"]),
            fix="put these keys back to go on as if never interrupted; accept_changes=true goes on from the last "
            "checkpoint with the new ones; overwrite=true or another output starts anew with them. "
            "A resumed run may change mesh, output, log, sample, checkpoint, eval (without early stopping), and places "
            "of model and data",
        )
    return changed


def _is_allowed(change: Change, before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    early = before["eval"]["early_stopping"] or after["eval"]["early_stopping"]
    if change.key in ROWS:
        return False
    if _matches(change.key, EVALUATION):
        return not early
    if _matches(change.key, FREE):
        return True
    if change.key in LENGTH:
        schedule = after["optimizer"]
        fixed_warmup = schedule["warmup_steps"] is not None or schedule["warmup_ratio"] == 0
        return schedule["schedule"] in ENDLESS and fixed_warmup and not early
    return False


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def _flat(recipe: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in recipe.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


COMMANDS = ("resume", "overwrite", "accept_changes")  # keys that say how to start, and are no part of the run


@dataclasses.dataclass(frozen=True)
class Resumed:
    """The newest undamaged checkpoint; `notes` are messages about what differs without hindering the run."""

    step: int
    best: Best | None
    stale: int
    kl_coef: float | None
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
    return Resumed(step, saved.best, saved.stale, saved.kl_coef, notes)


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
