"""Whether a run fits the memory that is free, and the changes with which it does."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from meshtune.config.recipe import Recipe
from meshtune.costs.hardware import Target
from meshtune.errors import UserError, amount
from meshtune.mesh.config import MeshConfig
from meshtune.mesh.layout import Layout
from meshtune.setup.memory import FreeMemory
from meshtune.setup.remedies import try_remedies
from meshtune.setup.search import (
    MESH,
    MICRO,
    Overrides,
    ScoredCandidate,
    apply_overrides,
    autotune,
    memory_limit,
    open_keys,
    override_arguments,
    rank_candidates,
    score,
    workload_of,
)
from meshtune.setup.shortage import MemoryShortage, size_in_words

ESTIMATE_ERROR = 0.1  # estimates are within so much of the compilers' figures (tests/costs/test_estimate.py)
GO_ON = "compute.memory_check=false goes on all the same"


@dataclasses.dataclass(frozen=True)
class MemoryCheck:
    """A run as it will be compared with the memory that is free.

    `recipe` is as it was given, `resolved` without open keys; rows have `length` positions.
    """

    recipe: Recipe
    resolved: Recipe
    target: Target
    layout: Layout | None
    length: int
    free: FreeMemory

    @property
    def rows_in_words(self) -> str:
        """The rows that are computed at once, for messages."""
        rows = self.resolved.train.batch_size // self.resolved.train.accumulation
        return f"train.micro_batch: {amount(rows, 'row')} of {self.length} positions at once"

    def before_loading(self) -> MemoryShortage | None:
        """The shortage that the estimate expects; None where it expects none, or knows nothing of the device."""
        scored = self._score(self.resolved)
        if scored is None:
            return None
        estimated, free = scored.estimate, self.free
        on_device = estimated.device_bytes + (estimated.host_bytes if free.shared else 0)
        for needed, available, where in (
            (on_device, free.device, "on each device"),
            (0 if free.shared else estimated.host_bytes, free.host, "of the host for each device"),
        ):
            if needed * (1 - ESTIMATE_ERROR) > available:
                return MemoryShortage(
                    f"an update is expected to need about {size_in_words(needed)} of memory {where}, and "
                    f"{size_in_words(available)} are free",
                    where=self.rows_in_words,
                    fix=self.fix(),
                )
        return None

    def fix(self, compiled: int | None = None) -> str:
        """Suggests a change that makes the run fit; `compiled` are the compiler's bytes per device, once it has run."""
        changes, needed = self.changes(compiled)
        if not changes:
            return f"a smaller data.max_length, a smaller model, or more devices (meshtune plan shows which); {GO_ON}"
        text = f"{' '.join(override_arguments(changes))} is expected to fit: about {size_in_words(needed)}"
        if set(changes) == {MICRO}:
            text += ", and the result stays the same"
        elif "train.batch_size" in changes:
            text += " (with another batch a run learns something else)"
        return f"{text}; {GO_ON}"

    def micro_batch(self, compiled: int | None = None) -> int | None:
        """The largest smaller micro-batch that is expected to fit without any other change; None if none
        is."""
        current = self._score(self.resolved)
        if current is None or self.recipe.optimizer.in_backward:
            return None
        smaller = (apply_overrides(self.resolved, {MICRO: rows}) for rows in self._smaller(current))
        scored = (self._score(recipe) for recipe in smaller)
        room = self._room(current, compiled)
        return next((fit.candidate.rows for fit in scored if fit is not None and self._bytes(fit) <= room), None)

    def changes(self, compiled: int | None = None) -> tuple[Overrides, int]:
        """(new values by key with which the run is expected to fit, the bytes per device that it then needs); {} if
        there are none."""
        current = self._score(self.resolved)
        if current is None:
            return {}, 0
        room = self._room(current, compiled)
        for changes in self._proposals(current):
            scored = self._score(self._resolve(changes))
            if scored is not None and self._bytes(scored) <= room:
                return changes, self._bytes(scored) * memory_limit(self._target) // room
        return {}, 0

    def _room(self, current: ScoredCandidate, compiled: int | None) -> int:
        """The largest estimate that counts as fitting, in bytes per device. The compiler's figure for `current`
        corrects the estimates of the others."""
        factor = 1.0 if compiled is None else max(1.0, compiled / self._bytes(current))
        return max(1, int(memory_limit(self._target) / factor))

    def _smaller(self, current: ScoredCandidate) -> list[int]:
        """Smaller micro-batches, largest first."""
        return [n for n in range(current.candidate.rows - 1, 0, -1) if self.resolved.train.batch_size % n == 0]

    def _proposals(self, current: ScoredCandidate) -> Iterator[Overrides]:
        """Changes from the mildest to the strongest: fewer rows at once, with what else is open, then remedies."""
        keys = open_keys(self.recipe)
        in_backward = self.recipe.optimizer.in_backward
        rows = current.candidate.rows
        try:
            ranked = rank_candidates(
                self.recipe, self._target, keys if in_backward else keys | {MICRO}, length=self.length
            )
        except UserError:
            ranked = []
        fitting = [] if in_backward else [scored for scored in ranked if scored.fits and scored.candidate.rows < rows]
        fitting.sort(key=lambda scored: -scored.candidate.rows)
        yield from ({MICRO: n} for n in dict.fromkeys(scored.candidate.rows for scored in fitting))
        yield from (scored.shown_overrides for scored in fitting)
        if in_backward:
            yield from ({"train.batch_size": n} for n in range(rows - 1, 0, -1) if n & (n - 1) == 0)
        start = min(ranked, key=lambda scored: scored.estimate.device_bytes, default=current)
        last = next((remedy for remedy in reversed(try_remedies(start, self.recipe)) if remedy.fits), None)
        if last is not None:
            assert last.scored is not None
            yield last.scored.shown_overrides

    @property
    def _target(self) -> Target:
        """The target with the memory that is free on it."""
        return dataclasses.replace(self.target, device=dataclasses.replace(self.target.device, memory=self.free.device))

    def _resolve(self, changes: Overrides) -> Recipe:
        """The recipe with changes, its open keys chosen as a run would choose them."""
        return autotune(apply_overrides(self.recipe, changes), self.target)[0]

    def _score(self, recipe: Recipe) -> ScoredCandidate | None:
        if not isinstance(recipe.mesh, MeshConfig):
            mesh: Mapping[str, int] = {} if self.layout is None else self.layout.mesh.shape
            recipe = apply_overrides(recipe, {MESH: {axis: n for axis, n in mesh.items() if n > 1} or {"fsdp": 1}})
        if recipe.train.micro_batch == "auto":
            recipe = apply_overrides(recipe, {MICRO: recipe.train.batch_size})
        try:
            return score(recipe, self.target, workload_of(recipe, self.target.device.backend), length=self.length)
        except UserError:
            return None

    def _bytes(self, scored: ScoredCandidate) -> int:
        return scored.estimate.device_bytes + (scored.estimate.host_bytes if self.free.shared else 0)
