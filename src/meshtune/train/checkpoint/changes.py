"""Resuming with another recipe: what changed, and whether the run can go on as if nothing had happened."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping
from typing import Any

from meshtune.errors import UserError
from meshtune.optim.optimizer import ENDLESS

# Keys that decide what is written, shown or kept, and never what is learned. Bases and data are known by their content
# (hashes in the checkpoint), so the places they lie in may change.
FREE = (
    "output", "resume", "overwrite", "accept_changes", "log.*", "sample.*", "evaluate", "evaluate.*", "hub", "hub.*",
    "checkpoint.*",
    "model.path", "model.revision", "model.load", "model.tokenizer", "model.chat_template", "model.adapter", "data.*",
    "mesh", "mesh.*", "compute.memory_check",
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
