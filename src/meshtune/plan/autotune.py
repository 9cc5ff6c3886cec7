"""Resolves `auto` in mesh, train.micro_batch and compute.remat with the search of `plan`, for the devices of a job."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from meshtune.config.recipe import Recipe
from meshtune.errors import UserError, counted
from meshtune.mesh.processes import SINGLE_PROCESS, Job
from meshtune.plan.hardware import Target
from meshtune.plan.search import MESH, MICRO, REMAT, ScoredCandidate, apply_overrides, open_keys, rank_candidates
from meshtune.setup.choices import Decision
from meshtune.setup.memory import size_in_words

NAMES = {MESH: "mesh", MICRO: "micro_batch", REMAT: "remat"}


def autotune(recipe: Recipe, target: Target, job: Job = SINGLE_PROCESS) -> tuple[Recipe, list[Decision]]:
    """The recipe with the best candidate's values for its open keys, and a Decision with the reason for each.

    Candidates are ranked by the analytic models, without compiling. All processes of `job` use the result of the first.
    Raises: UserError if no mesh of these devices is possible for the model and the batch.
    """
    keys = open_keys(recipe)
    if not keys:
        return recipe, []
    try:
        ranked = rank_candidates(recipe, target, keys)
    except UserError:
        if MESH in keys:
            raise
        return recipe, []  # what the recipe asks for is impossible: its own check has the better message
    best = ranked[0]
    local = [(NAMES[key], _value(key, best), _reason(key, best, ranked)) for key in NAMES if key in keys]
    overrides, decisions = job.exchange("autotuned keys", [best.overrides, local])[0]
    return apply_overrides(recipe, overrides), [Decision(*fields) for fields in decisions]


def merge_decisions(autotuned: Sequence[Decision], decisions: Sequence[Decision]) -> list[Decision]:
    """`decisions`, made from the autotuned recipe, with the reasons of those that were autotuned."""
    reasons = {choice.name: choice.reason for choice in autotuned}
    names = {choice.name for choice in decisions}
    merged = [dataclasses.replace(choice, reason=reasons.get(choice.name, choice.reason)) for choice in decisions]
    return merged + [choice for choice in autotuned if choice.name not in names]


def _value(key: str, best: ScoredCandidate) -> str:
    candidate = best.candidate
    return {MESH: str(best.mesh), MICRO: counted(candidate.rows, "row"), REMAT: candidate.remat}[key]


def _reason(key: str, best: ScoredCandidate, ranked: list[ScoredCandidate]) -> str:
    if key == MESH and best.mesh.devices == 1:
        return "auto: one device"
    memory = f"about {size_in_words(best.estimate.device_bytes)} per device"
    if not best.fits:
        device = best.candidate.target.device.name
        return f"auto: no configuration is expected to fit {device}; this one needs the least memory, {memory}"
    rank = (
        f"expected to be the fastest of {len(ranked)} that are possible" if len(ranked) > 1 else "the only one possible"
    )
    return f"auto: {rank}, {memory}"
