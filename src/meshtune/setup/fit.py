"""Compares a run with the memory that is free, and finds the changes with which it fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from meshtune.config.recipe import Recipe
from meshtune.costs.hardware import Target, known_devices
from meshtune.costs.workload import Candidate, layout_on
from meshtune.errors import UserError, amount
from meshtune.mesh.config import MeshConfig
from meshtune.mesh.layout import Layout
from meshtune.model.model_cache import rows_bucket
from meshtune.setup.memory import FreeMemory
from meshtune.setup.search import (
    MESH,
    MICRO,
    OFFLOAD,
    QUANTIZE,
    REMAT,
    ROWS,
    Overrides,
    OverrideValue,
    PredictedCandidate,
    apply_overrides,
    autotune,
    memory_limit,
    open_keys,
    override_arguments,
    predict_candidate,
    rank_candidates,
    workload_of,
)
from meshtune.setup.shortage import MemoryShortage, size_in_words
from meshtune.translatable import Translatable

# Commonly available machine sizes as (hosts, devices per host), smallest first.
SIZES = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8), (8, 8), (16, 8), (32, 8), (64, 8))
CHUNKS = (4096, 1024)  # tokens of a row


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A change that saves memory: its name, its cost, and the candidate with it (None if it does not apply).

    `refusal` says why it does not apply. `changes` are the overrides that it adds; it is `redundant` if a later remedy
    makes it unnecessary.
    """

    name: str
    cost: str
    predicted: PredictedCandidate | None
    refusal: str = ""
    changes: Overrides = dataclasses.field(default_factory=dict)
    redundant: bool = False

    @property
    def fits(self) -> bool:
        return self.predicted is not None and self.predicted.fits

    @property
    def overrides(self) -> Overrides:
        """All overrides of the candidate, those of earlier remedies included."""
        return {} if self.predicted is None else self.predicted.overrides


@dataclasses.dataclass(frozen=True)
class _Proposal:
    """A remedy to try: alternative overrides, or the recipe key by which the user has `fixed` it."""

    name: str
    cost: str
    alternatives: Sequence[Overrides]
    fixed: str | None


def try_remedies(start: PredictedCandidate, recipe: Recipe) -> list[Remedy]:
    """Applies remedies, each on top of those before it, until the run fits. Keys that `recipe` sets are not changed."""
    remedies: list[Remedy] = []
    best = start
    for proposal in _proposals(recipe, start.candidate):
        name, cost = proposal.name, proposal.cost
        if proposal.fixed:
            remedies.append(Remedy(name, cost, None, Translatable("the recipe sets {key}", key=proposal.fixed)))
            continue
        better = _best_alternative(best, proposal.alternatives)
        if isinstance(better, str):
            remedies.append(Remedy(name, cost, None, better))
            continue
        if better.device_bytes >= best.device_bytes:
            remedies.append(Remedy(name, cost, None, Translatable("it saves nothing here")))
            continue
        changes = {key: value for key, value in better.overrides.items() if best.overrides.get(key) != value}
        remedies.append(Remedy(name, cost, better, changes=changes))
        best = better
        if better.fits:
            return _without_redundant(remedies, start)
    return remedies


def _without_redundant(remedies: list[Remedy], start: PredictedCandidate) -> list[Remedy]:
    """Marks the remedies that the last one makes unnecessary, and removes their overrides from its candidate."""
    last = remedies[-1]
    assert last.predicted is not None
    best = last.predicted
    for remedy in remedies[:-1]:
        fewer = {key: value for key, value in best.overrides.items() if remedy.changes.get(key) != value}
        if remedy.predicted is None or len(fewer) == len(best.overrides):
            continue
        restored = {key: start.overrides[key] for key in remedy.changes if key in start.overrides}
        reduced = _best_alternative(start, [{**fewer, **restored}])
        if not isinstance(reduced, str) and reduced.fits:
            best = reduced
    needed = set(best.overrides)
    remedies = [*remedies[:-1], dataclasses.replace(last, predicted=best)]
    return [dataclasses.replace(remedy, redundant=not set(remedy.changes) <= needed) for remedy in remedies]


def smallest_machine(recipe: Recipe, target: Target) -> Target | None:
    """The machine with the least memory on which some configuration is estimated to fit, with weights on the devices.

    Of two with equal memory, the one with fewer devices; None if even hundreds of the largest devices do not suffice.
    """
    available = [device for device in known_devices().values() if device.platform != "cpu"]
    if target.device.name not in {device.name for device in available}:
        available.append(target.device)
    machines = [Target(hosts, per_host, device) for device in available for hosts, per_host in SIZES]
    for machine in sorted(machines, key=lambda machine: (machine.devices * machine.device.memory, machine.devices)):
        if _can_fit(recipe, machine):
            return machine
    return None


def _can_fit(recipe: Recipe, machine: Target) -> bool:
    """Whether the leanest configurations fit: layers recomputed, small micro-batches, offloading where allowed."""
    keys = open_keys(recipe, search=True)
    quantise = QUANTIZE in keys and recipe.method.adapters is not None
    workload = workload_of(
        apply_overrides(recipe, {QUANTIZE: "nf4"}) if quantise else recipe, machine.device.backend, machine.device.arch
    )
    layout = layout_on(MeshConfig(fsdp=1), workload.spec)
    roles = ("frozen", "full", "adapter") if OFFLOAD in keys else ("frozen", "full", "adapter", "optimizer")
    persistent = sum(array.local_bytes(layout) for array in workload.persistent if array.role in roles)
    if persistent > memory_limit(machine) * machine.devices:
        return False
    lean: dict[str, OverrideValue] = {REMAT: "full"} if REMAT in keys else {}
    if quantise:
        lean[QUANTIZE] = "nf4"
    if OFFLOAD in keys:
        lean[OFFLOAD] = ["residual", "optimizer"]
    micro_batch = recipe.train.batch_size // recipe.train.accumulation
    sizes = [n for n in range(1, micro_batch + 1) if micro_batch % n == 0] if MICRO in keys else [micro_batch]
    for mesh in _meshes(machine):
        for rows in sizes:
            overrides = {**lean, MESH: mesh, **({MICRO: rows} if MICRO in keys else {})}
            try:
                if predict_candidate(apply_overrides(recipe, overrides), machine, workload).fits:
                    return True
            except UserError:
                continue
    return False


def _best_alternative(start: PredictedCandidate, alternatives: Sequence[Overrides]) -> PredictedCandidate | str:
    """The first alternative that fits, else the one that needs least memory, or the reason why none is possible."""
    possible: list[PredictedCandidate] = []
    target, reason = start.candidate.target, Translatable("it does not apply to this recipe")
    for overrides in alternatives:
        recipe = apply_overrides(start.recipe, overrides)
        try:
            quantised = QUANTIZE in overrides
            workload = (
                workload_of(recipe, target.device.backend, target.device.arch)
                if quantised
                else start.candidate.workload
            )
            predicted = predict_candidate(recipe, target, workload, {**start.overrides, **overrides})
        except UserError as error:
            reason = error.what
            continue
        if predicted.fits:
            return predicted
        possible.append(predicted)
    return min(possible, key=lambda predicted: predicted.device_bytes) if possible else reason


def _proposals(recipe: Recipe, candidate: Candidate) -> Iterator[_Proposal]:
    """All remedies in the order of their cost."""
    micro_batch, compute = candidate.rows, recipe.compute
    searchable = open_keys(recipe, search=True)

    def unless_open(key: str) -> str | None:
        return None if key in searchable else key

    meshes: list[Overrides] = [{MESH: mesh} for mesh in _meshes(candidate.target)]
    smaller = [{MICRO: n} for n in range(micro_batch - 1, 0, -1) if micro_batch % n == 0]
    yield _Proposal(
        Translatable("recompute layers"), Translatable("a third more arithmetic"), [{REMAT: "full"}], unless_open(REMAT)
    )
    yield _Proposal(Translatable("another mesh"), Translatable("other messages"), meshes, unless_open(MESH))
    yield _Proposal(
        Translatable("smaller micro-batches"), Translatable("more messages per update"), smaller, unless_open(MICRO)
    )
    for key, name, current in (
        ("compute.mlp_chunk", Translatable("chunked norm and feed-forward"), compute.mlp_chunk),
        ("compute.attention_chunk", Translatable("chunked attention queries"), compute.attention_chunk),
    ):
        yield _Proposal(name, Translatable("a little arithmetic"), [{key: n} for n in CHUNKS], key if current else None)
    offload_set = OFFLOAD if "offload" in compute.model_fields_set else None
    offloaded = list(candidate.offload)
    for part, name, cost in (
        (
            "residual",
            Translatable("residual stream on the host"),
            Translatable("PCIe traffic that overlaps with computation"),
        ),
        (
            "optimizer",
            Translatable("optimizer state on the host"),
            Translatable("PCIe traffic at the end of an update"),
        ),
    ):
        yield _Proposal(name, cost, [{OFFLOAD: list(dict.fromkeys([*offloaded, part]))}], offload_set)
        offloaded = [*offloaded, part]
    lora = recipe.method.adapters is not None
    nf4: list[Overrides] = [{QUANTIZE: "nf4"}] if lora else []
    yield _Proposal(
        Translatable("nf4 base"), Translatable("rounded frozen weights"), nf4, unless_open(QUANTIZE) if lora else None
    )
    on_host: list[Overrides] = [{OFFLOAD: [*offloaded, "weights"]}]
    yield _Proposal(Translatable("weights on the host"), Translatable("all weights cross PCIe"), on_host, offload_set)


def _meshes(target: Target) -> list[dict[str, int]]:
    """Fully sharded meshes, alone and with 2, 4 or 8 ways of tp or cp."""
    n = target.devices
    meshes = [{"fsdp": n}] + [
        {"fsdp": n // size, axis: size} for size in (2, 4, 8) if n % size == 0 for axis in ("tp", "cp")
    ]
    return [{axis: size for axis, size in mesh.items() if size > 1} or {"fsdp": 1} for mesh in meshes]


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
        predicted = self._predict(self.resolved)
        if predicted is None:
            return None
        estimated, free = predicted.estimate, self.free
        on_device, rollout = self._bytes(predicted), predicted.rollout
        is_rollout = rollout is not None and rollout.device_bytes > estimated.device_bytes
        name = "a rollout" if is_rollout else "an update"
        computed = (
            f"{ROWS}: {rollout.rows} rows of up to {rollout.slots} positions at once" if rollout and is_rollout else ""
        )
        apart = not (free.shared or self.target.device.unified)
        for needed, available, where in (
            (on_device, free.device, "on each device"),
            (estimated.host_bytes if apart else 0, free.host, "of the host for each device"),
        ):
            if needed * (1 - ESTIMATE_ERROR) > available:
                return MemoryShortage(
                    f"{name} is expected to need about {size_in_words(needed)} of memory {where}, and "
                    f"{size_in_words(available)} are free",
                    where=computed or self.rows_in_words,
                    fix=self.fix(),
                )
        return None

    def fix(self, compiled: int | None = None) -> str:
        """Suggests a change that makes the run fit; `compiled` are the compiler's bytes per device, once it has run."""
        changes, needed = self.changes(compiled)
        if not changes:
            return f"a smaller data.max_length, a smaller model, or more devices (meshtune plan shows which); {GO_ON}"
        text = f"{' '.join(override_arguments(changes))} is expected to fit: about {size_in_words(needed)}"
        if set(changes) <= {MICRO, ROWS}:
            text += ", and the result stays the same"
        elif "train.batch_size" in changes:
            text += " (with another batch a run learns something else)"
        return f"{text}; {GO_ON}"

    def rollout_rows(self) -> int | None:
        """The most rows of a rollout that are expected to fit; None if the recipe sets them, or if not one fits."""
        if self.recipe.rollout is None or self.recipe.rollout.rows is not None:
            return None
        predicted = self._predict(apply_overrides(self.resolved, {ROWS: None}), self._target)
        rollout = None if predicted is None else predicted.rollout
        return rollout.rows if rollout and rollout.device_bytes <= memory_limit(self._target) else None

    def micro_batch(self, compiled: int | None = None) -> int | None:
        """The largest smaller micro-batch that is expected to fit without any other change; None if none
        is."""
        current = self._predict(self.resolved)
        if current is None or self.recipe.optimizer.in_backward:
            return None
        smaller = (apply_overrides(self.resolved, {MICRO: rows}) for rows in self._smaller(current))
        predicted = (self._predict(recipe) for recipe in smaller)
        room = self._room(current, compiled)
        return next((fit.candidate.rows for fit in predicted if fit is not None and self._bytes(fit) <= room), None)

    def changes(self, compiled: int | None = None) -> tuple[Overrides, int]:
        """(new values by key with which the run is expected to fit, the bytes per device that it then needs); {} if
        there are none."""
        current = self._predict(self.resolved)
        if current is None:
            return {}, 0
        room = self._room(current, compiled)
        for changes in self._proposals(current):
            predicted = self._predict(self._resolve(changes))
            if predicted is not None and self._bytes(predicted) <= room:
                return changes, self._bytes(predicted) * memory_limit(self._target) // room
        return {}, 0

    def _room(self, current: PredictedCandidate, compiled: int | None) -> int:
        """The largest estimate that counts as fitting, in bytes per device. The compiler's figure for `current`
        corrects the estimates of the others."""
        factor = 1.0 if compiled is None else max(1.0, compiled / self._bytes(current))
        return max(1, int(memory_limit(self._target) / factor))

    def _smaller(self, current: PredictedCandidate) -> list[int]:
        """Smaller micro-batches, largest first."""
        return [n for n in range(current.candidate.rows - 1, 0, -1) if self.resolved.train.batch_size % n == 0]

    def _proposals(self, current: PredictedCandidate) -> Iterator[Overrides]:
        """Changes from the mildest to the strongest: fewer rows at once, with what else is open, then remedies."""
        keys = open_keys(self.recipe)
        yield from self._fewer_rollout_rows(current)
        in_backward = self.recipe.optimizer.in_backward
        rows = current.candidate.rows
        try:
            ranked = rank_candidates(
                self.recipe, self._target, keys if in_backward else keys | {MICRO}, length=self.length
            )
        except UserError:
            ranked = []
        fitting = (
            []
            if in_backward
            else [predicted for predicted in ranked if predicted.fits and predicted.candidate.rows < rows]
        )
        fitting.sort(key=lambda predicted: -predicted.candidate.rows)
        yield from ({MICRO: n} for n in dict.fromkeys(predicted.candidate.rows for predicted in fitting))
        yield from (predicted.shown_overrides for predicted in fitting)
        if in_backward:
            yield from ({"train.batch_size": n} for n in range(rows - 1, 0, -1) if n & (n - 1) == 0)
        start = min(ranked, key=lambda predicted: predicted.device_bytes, default=current)
        last = next((remedy for remedy in reversed(try_remedies(start, self.recipe)) if remedy.fits), None)
        if last is not None:
            assert last.predicted is not None
            yield last.predicted.shown_overrides

    def _fewer_rollout_rows(self, current: PredictedCandidate) -> Iterator[Overrides]:
        if current.rollout is not None:
            yield from ({ROWS: n} for n in range(current.rollout.rows - 1, 0, -1) if rows_bucket(n) == n)

    @property
    def _target(self) -> Target:
        """The target with the memory that is free on it."""
        return dataclasses.replace(self.target, device=dataclasses.replace(self.target.device, memory=self.free.device))

    def _resolve(self, changes: Overrides) -> Recipe:
        """The recipe with changes, its open keys chosen as a run would choose them."""
        return autotune(apply_overrides(self.recipe, changes), self.target)[0]

    def _predict(self, recipe: Recipe, target: Target | None = None) -> PredictedCandidate | None:
        if not isinstance(recipe.mesh, MeshConfig):
            mesh: Mapping[str, int] = {} if self.layout is None else self.layout.mesh.shape
            recipe = apply_overrides(recipe, {MESH: {axis: n for axis, n in mesh.items() if n > 1} or {"fsdp": 1}})
        if recipe.train.micro_batch == "auto":
            recipe = apply_overrides(recipe, {MICRO: recipe.train.batch_size})
        try:
            return predict_candidate(
                recipe,
                target or self.target,
                workload_of(recipe, self.target.device.backend, self.target.device.arch),
                length=self.length,
            )
        except UserError:
            return None

    def _bytes(self, predicted: PredictedCandidate) -> int:
        apart = not predicted.candidate.target.device.unified  # else device_bytes has those of the host
        return predicted.device_bytes + (predicted.estimate.host_bytes if self.free.shared and apart else 0)
