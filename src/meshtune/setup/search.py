"""Searches meshes, micro-batches and memory savings for the keys that a recipe leaves open, ranked by expected time.

A candidate is a recipe with its open keys filled in. The analytic models (estimate, roofline) rank thousands of
candidates in seconds; `plan.report` compiles the best few. `mesh: auto`, `train.micro_batch: auto` and
`compute.remat: auto` run this search.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from meshtune.config.recipe import Recipe
from meshtune.config.section import Section
from meshtune.costs.estimate import Estimate, estimate, estimated_collectives
from meshtune.costs.hardware import Target
from meshtune.costs.roofline import Roofline, roofline, work_of
from meshtune.costs.workload import Candidate, PersistentArray, Workload, layout_on, workload_on
from meshtune.errors import UserError, amount
from meshtune.lazy import LazyFunction
from meshtune.mesh.config import MeshConfig, resolve_mesh, slice_factors
from meshtune.mesh.processes import SINGLE_PROCESS, Job
from meshtune.model.gather import check_batch, check_experts
from meshtune.model.model_cache import rows_bucket
from meshtune.objectives.config import TEACHER
from meshtune.quantize.config import FormatName, QuantizeConfig
from meshtune.quantize.published import read_scheme
from meshtune.quantize.published.scheme import Scheme
from meshtune.setup.choices import Decision, compute_of, optimizer_of, precision_of
from meshtune.setup.machine import Machine
from meshtune.setup.memory import size_in_words
from meshtune.setup.stage import abstract_model, row_length, scoring_passes
from meshtune.setup.start import start_of
from meshtune.weights.hub import CONFIG, locate
from meshtune.weights.load import load_config, stored_dtype

if TYPE_CHECKING:
    from meshtune.costs.decoding import Lengths, RolloutCost

teacher_of = LazyFunction("meshtune.setup.teacher:teacher_of")
reward_model_bytes = LazyFunction("meshtune.setup.teacher:reward_model_bytes")
filled_micro_batches = LazyFunction("meshtune.costs.decoding:filled_micro_batches")
longest_lengths = LazyFunction("meshtune.costs.decoding:longest_lengths")
rollout_cost = LazyFunction("meshtune.costs.decoding:rollout_cost")

RESERVE = 0.06  # share of a device's memory left to the driver, library workspaces and fragmentation
MESH, MICRO, REMAT, OFFLOAD, QUANTIZE = "mesh", "train.micro_batch", "compute.remat", "compute.offload", "quantize"
ROWS, PATCHES = "rollout.rows", "vision.max_patches"
EQUAL_TIME_FACTOR = 1.03  # expected times within this factor count as equal: the simpler configuration comes first
REMATS = ("selective", "full")  # "none" saves what is cheaper to recompute than to store and load
OFFLOADS = ((), ("residual",), ("optimizer",), ("residual", "optimizer"), ("residual", "optimizer", "weights"))
FORMATS = (None, "nf4")

OverrideValue = str | int | list[str] | dict[str, int] | None
Overrides = Mapping[str, OverrideValue]  # new values by recipe key, with at most one dot


@dataclasses.dataclass(frozen=True)
class PredictedCandidate:
    """A candidate with what the analytic models predict. `overrides` are the keys in which its recipe was changed.

    `estimate` and `roofline` are of an update; `rollout` is None for stages that generate nothing.
    """

    recipe: Recipe
    overrides: Overrides
    candidate: Candidate
    estimate: Estimate
    roofline: Roofline
    rollout: RolloutCost | None = None

    @property
    def device_bytes(self) -> int:
        """Peak bytes on one device, of an update or a rollout; the host's too where the device has the same memory."""
        update = self.estimate.device_bytes
        if self.candidate.target.device.unified:
            update += self.estimate.host_bytes
        return max(update, 0 if self.rollout is None else self.rollout.device_bytes)

    @property
    def seconds(self) -> float:
        """Seconds of an update with its share of a rollout."""
        return self.roofline.seconds + (0.0 if self.rollout is None else self.rollout.seconds_per_update)

    @property
    def memory_limit(self) -> int:
        """Bytes of a device that a run may use."""
        return memory_limit(self.candidate.target)

    @property
    def fits(self) -> bool:
        return self.device_bytes <= self.memory_limit

    @property
    def mesh(self) -> MeshConfig:
        return self.candidate.mesh

    @property
    def shown_overrides(self) -> dict[str, OverrideValue]:
        """`overrides` without the mesh of a single device, which is the default, and with the rows of a rollout."""
        rows = {ROWS: self.rollout.rows} if self.rollout and _rows_are_open(self.recipe) else {}
        shown = {key: value for key, value in self.overrides.items() if key != MESH or self.mesh.devices > 1}
        return shown | rows


def _rows_are_open(recipe: Recipe) -> bool:
    return recipe.rollout is not None and recipe.rollout.rows is None


def _published_scheme(recipe: Recipe) -> Scheme | None:
    """Returns the scheme in which the weights of a recipe's model are published quantised, if they are."""
    config = locate(recipe.model.path, recipe.model.revision, allow=CONFIG)
    return read_scheme(load_config(config), str(config))[0]


def memory_limit(target: Target, reserve: float = RESERVE) -> int:
    """Bytes of a device's memory without the reserve."""
    return int(target.device.memory * (1 - reserve))


def open_keys(recipe: Recipe, *, search: bool = False) -> frozenset[str]:
    """Keys to search over: those set to `auto`, and with `search` also those that the recipe does not set."""
    layerwise = recipe.optimizer.layerwise  # fixes remat and what is offloaded
    is_open = {
        MESH: recipe.mesh == "auto",
        MICRO: not recipe.optimizer.in_backward
        and (recipe.train.micro_batch == "auto" or (search and "micro_batch" not in recipe.train.model_fields_set)),
        REMAT: recipe.compute.remat == "auto" and not layerwise,
        OFFLOAD: search and not layerwise and "offload" not in recipe.compute.model_fields_set,
        QUANTIZE: search
        and "quantize" not in recipe.model_fields_set
        and recipe.method.adapters is not None
        and _published_scheme(recipe) is None,
        ROWS: _rows_are_open(recipe),
    }
    return frozenset(key for key, value in is_open.items() if value)


def rank_candidates(
    recipe: Recipe, target: Target, keys: frozenset[str], *, length: int | None = None
) -> list[PredictedCandidate]:
    """All candidates that model and batch allow, best first: those that fit by time, then the others by memory.

    A quantised base changes results, so it is tried only if no candidate fits without. Rows have `length` tokens, by
    default data.max_length. Raises: UserError, that of the first candidate, if none is possible.
    """
    candidates: list[PredictedCandidate] = []
    errors: list[UserError] = []
    for quantised in FORMATS if QUANTIZE in keys else (None,):
        variant = apply_overrides(recipe, {QUANTIZE: quantised}) if quantised else recipe
        workload = workload_of(variant, target.device.backend, target.device.arch)
        for overrides, candidate in _combinations(variant, target, keys):
            if quantised:
                overrides = {**overrides, QUANTIZE: quantised}
            try:
                candidates.append(predict_candidate(candidate, target, workload, overrides, length=length))
            except UserError as error:
                errors.append(error)
        if any(candidate.fits for candidate in candidates):
            break
    if not candidates:
        raise _nothing_possible(recipe, target, keys, errors)
    return sorted(candidates, key=_rank)


def _nothing_possible(recipe: Recipe, target: Target, keys: frozenset[str], errors: list[UserError]) -> UserError:
    if MESH not in keys:
        return errors[0]
    rows = recipe.train.batch_size // recipe.train.accumulation
    reasons = dict.fromkeys(error.what for error in errors)
    return UserError(
        f"no mesh of {target.devices} devices fits {rows} rows a micro-batch and this model: {'; '.join(reasons)}",
        where="mesh",
        fix=f"make train.micro_batch a multiple of {target.devices}, or give mesh by hand with fewer devices",
    )


def _rank(predicted: PredictedCandidate) -> tuple[float, ...]:
    """Sort key: those that fit by time; with equal times, less offloading and fewer splits come first."""
    sizes = predicted.mesh.sizes
    simplicity = (len(predicted.candidate.offload), sizes["cp"], sizes["tp"], predicted.candidate.accumulation)
    if predicted.fits:
        return 0, round(math.log(predicted.seconds) / math.log(EQUAL_TIME_FACTOR)), *simplicity
    return 1, predicted.device_bytes, *simplicity


def workload_of(recipe: Recipe, backend: str, arch: str = "") -> Workload:
    """Resolves a recipe for a JAX backend and architecture from the model's config, and counts its arrays.

    Raises: UserError for an invalid model or method.
    """
    source = locate(recipe.model.path, recipe.model.revision, allow=CONFIG)
    config = load_config(source)
    precision, _ = precision_of(recipe, stored_dtype(source, config), backend, arch, config)
    start = start_of(recipe, source, precision.frozen)
    arrays = abstract_model(recipe, start.method, start.spec, precision.trainable, recipe.quantize)
    if recipe.teacher and (teacher := teacher_of(recipe, precision.frozen, start.spec, weights=False)):
        arrays = dataclasses.replace(arrays, frozen=arrays.frozen | {TEACHER: teacher.parameters})
    workload = workload_on(arrays, recipe, start.method, precision, optimizer_of(recipe, precision))
    if not any(reward.kind == "model" for reward in recipe.rewards):
        return workload
    # Each is whole on one device, the first: that is the one that must have room.
    rewards = reward_model_bytes(recipe, backend).items()
    frozen = (
        PersistentArray("frozen", f"rewards/{path}", (int(size),), 1.0, ("embed",), (1,)) for path, size in rewards
    )
    return dataclasses.replace(workload, persistent=(*workload.persistent, *frozen))


def predict_candidate(
    recipe: Recipe,
    target: Target,
    workload: Workload,
    overrides: Overrides | None = None,
    *,
    length: int | None = None,
    lengths: Lengths | None = None,
) -> PredictedCandidate:
    """Estimates memory and time of a recipe without open keys; open rows of a rollout are the most that fit.

    `lengths` of completions are the worst case if none are given, as they always are for memory.
    Raises: UserError for a mesh or batch that the model does not allow.
    """
    candidate = candidate_of(recipe, target, workload, length=length)
    if recipe.rollout is not None:
        lengths = lengths or longest_lengths(candidate)
    filled = filled_candidate(candidate, lengths)
    collectives = estimated_collectives(filled)
    times = roofline(work_of(filled), collectives, target, dtype=workload.precision.compute)
    rollout = None if lengths is None else _rollout(recipe, candidate, times, lengths)
    return PredictedCandidate(recipe, overrides or {}, candidate, estimate(candidate), times, rollout)


def filled_candidate(candidate: Candidate, lengths: Lengths | None) -> Candidate:
    """The candidate with only those micro-batches that hold something, if its stage generates completions."""
    if lengths is None:
        return candidate
    return dataclasses.replace(candidate, accumulation=filled_micro_batches(candidate, lengths))


def _rollout(recipe: Recipe, candidate: Candidate, update: Roofline, lengths: Lengths) -> RolloutCost:
    """The rollout with the rows that the recipe asks for, or with the most that fit, and one where none do."""
    assert recipe.rollout is not None
    most = recipe.rollout.prompts * recipe.rollout.samples
    rows = most if recipe.rollout.rows is None else min(recipe.rollout.rows, most)
    passes = scoring_passes(recipe)
    while True:
        cost = rollout_cost(candidate, update, rows, lengths, passes)
        if recipe.rollout.rows is not None or rows == 1 or cost.device_bytes <= memory_limit(candidate.target):
            return cost
        rows = max(n for n in range(1, rows) if rows_bucket(n) == n)


def candidate_of(recipe: Recipe, target: Target, workload: Workload, *, length: int | None = None) -> Candidate:
    """The candidate of a recipe without open keys. Raises: UserError as `predict_candidate` does."""
    assert isinstance(recipe.mesh, MeshConfig)
    assert recipe.train.micro_batch != "auto"
    config = recipe.mesh
    check_experts(config.ep, workload.spec)
    mesh = resolve_mesh(config, target.devices)
    slice_factors(mesh, target.slices)
    rows, length = recipe.train.batch_size // recipe.train.accumulation, length or row_length(recipe)
    check_batch(mesh, rows, length)
    layout = layout_on(mesh, workload.spec)
    compute, _ = compute_of(recipe, workload.spec, workload.precision, rows, length, layout, _machine(target))
    return Candidate(
        workload=workload,
        target=target,
        mesh=mesh,
        layout=layout,
        rows=rows,
        length=length,
        accumulation=recipe.train.accumulation,
        remat=compute.remat,
        loss_chunk=compute.loss_chunk,
        mlp_chunk=compute.mlp_chunk,
        attention_chunk=compute.attention_chunk,
        offload=compute.offload,
        shared_prompts=compute.shared_prompts,
    )


def _machine(target: Target) -> Machine:
    """The target as the choice of an attention backend sees it; that choice needs no device objects."""
    return Machine(target.device.platform, (), target.device.arch)


def _combinations(
    recipe: Recipe, target: Target, keys: frozenset[str]
) -> Iterator[tuple[dict[str, OverrideValue], Recipe]]:
    """(overrides, recipe with them applied) for every combination of values of the open keys."""
    meshes = list(_meshes(target)) if MESH in keys else [None]
    micro_batches = _divisors(recipe.train.batch_size) if MICRO in keys else [None]
    remats = REMATS if REMAT in keys else [None]
    offloads = OFFLOADS if OFFLOAD in keys else [None]
    for mesh, micro_batch, remat, offload in itertools.product(meshes, micro_batches, remats, offloads):
        overrides: dict[str, OverrideValue] = {}
        if mesh is not None:
            overrides[MESH] = {axis: size for axis, size in mesh.sizes.items() if size > 1} or {"fsdp": 1}
        if micro_batch is not None:
            overrides[MICRO] = micro_batch
        if remat is not None:
            overrides[REMAT] = remat
        if offload:
            overrides[OFFLOAD] = list(offload)
        yield overrides, apply_overrides(recipe, overrides)


def apply_overrides(recipe: Recipe, overrides: Overrides) -> Recipe:
    """The recipe with some of its keys (dotted, at most one dot) changed. Fields are not validated again."""
    changed: dict[str, object] = {}
    for key, value in overrides.items():
        section, _, name = key.partition(".")
        if key == MESH:
            assert isinstance(value, dict)
            changed[MESH] = dataclasses.replace(MeshConfig(), **value)
        elif key == QUANTIZE:
            changed[QUANTIZE] = QuantizeConfig(cast(FormatName, value))
        elif not name:
            changed[section] = value
        else:
            current = changed.get(section, getattr(recipe, section))
            assert isinstance(current, Section)
            changed[section] = current.model_copy(update={name: tuple(value) if isinstance(value, list) else value})
    return recipe.model_copy(update=changed)


def override_arguments(overrides: Overrides) -> list[str]:
    """Overrides as command-line arguments: `mesh.fsdp=8 compute.remat=full`."""
    arguments = []
    for key, value in overrides.items():
        if isinstance(value, dict):
            arguments += [f"{key}.{name}={item}" for name, item in value.items()]
        elif isinstance(value, list):
            arguments.append(f"{key}=[{','.join(map(str, value))}]")
        else:
            arguments.append(f"{key}={value}")
    return arguments


def _meshes(target: Target) -> Iterator[MeshConfig]:
    """Every way to factor the devices into dp, fsdp, cp and tp, with tp inside a host, and only dp across slices."""
    devices = target.devices
    for dp in _divisors(devices):
        if dp % target.slices:
            continue
        for tp in _divisors(devices // dp):
            if tp <= target.per_host:
                for cp in _divisors(devices // (dp * tp)):
                    yield MeshConfig(dp=dp, fsdp=devices // (dp * tp * cp), tp=tp, cp=cp)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


NAMES = {MESH: "mesh", MICRO: "micro_batch", REMAT: "remat", ROWS: "rollout rows"}


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
        return recipe, []  # the recipe asks for something impossible: its own check has the better message
    best = ranked[0]
    local = [(NAMES[key], _value(key, best), _reason(key, best, ranked)) for key in NAMES if key in keys]
    chosen = dict(best.overrides) | ({ROWS: best.rollout.rows} if best.rollout and ROWS in keys else {})
    overrides, decisions = job.broadcast("autotuned keys", [chosen, local])
    return apply_overrides(recipe, overrides), [Decision(*fields) for fields in decisions]


def merge_decisions(autotuned: Sequence[Decision], decisions: Sequence[Decision]) -> list[Decision]:
    """`decisions`, made from the autotuned recipe, with the reasons of those that were autotuned."""
    reasons = {choice.name: choice.reason for choice in autotuned}
    names = {choice.name for choice in decisions}
    merged = [dataclasses.replace(choice, reason=reasons.get(choice.name, choice.reason)) for choice in decisions]
    return merged + [choice for choice in autotuned if choice.name not in names]


def _value(key: str, best: PredictedCandidate) -> str:
    candidate = best.candidate
    values = {MESH: str(best.mesh), MICRO: amount(candidate.rows, "row"), REMAT: candidate.remat}
    return values[key] if best.rollout is None or key != ROWS else amount(best.rollout.rows, "completion") + " at once"


def _reason(key: str, best: PredictedCandidate, ranked: list[PredictedCandidate]) -> str:
    if key == MESH and best.mesh.devices == 1:
        return "auto: one device"
    if key == ROWS and best.rollout is not None:
        memory = f"about {size_in_words(best.rollout.device_bytes)} per device"
        everything = best.rollout.rows >= best.rollout.completions
        return f"auto: {'all of a rollout' if everything else 'the most that are expected to fit'}, {memory}"
    memory = f"about {size_in_words(best.device_bytes)} per device"
    if not best.fits:
        device = best.candidate.target.device.name
        return f"auto: no configuration is expected to fit {device}; this one needs the least memory, {memory}"
    rank = (
        f"expected to be the fastest of {len(ranked)} that are possible" if len(ranked) > 1 else "the only one possible"
    )
    return f"auto: {rank}, {memory}"
