"""Plans a recipe for one target: whether it fits, what would make it fit, how long it takes and what it costs."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from meshtune.cache import cache_folder
from meshtune.config.recipe import DEFAULT_EPOCHS, Recipe
from meshtune.config.sections import DataSection
from meshtune.costs.collectives import Collective
from meshtune.costs.decoding import Lengths, RolloutCost
from meshtune.costs.estimate import ROLES, estimated_collectives, reference_bytes
from meshtune.costs.hardware import Device, Target
from meshtune.costs.reliability import Reliability
from meshtune.costs.roofline import Roofline, roofline, work_of
from meshtune.data.checking import CheckedSource
from meshtune.data.documents import DocumentList, load_documents
from meshtune.data.pictures.files import PictureFiles
from meshtune.data.prepare import prepare_data
from meshtune.data.prompts import PromptLoader
from meshtune.data.tokenizer import tokenizer_of
from meshtune.errors import UserError
from meshtune.kernels.chips import chip_of, without_triton
from meshtune.objectives.stages import STAGES
from meshtune.plan.compilers import compile_recipe
from meshtune.plan.compilers.compile import Compiled
from meshtune.plan.compilers.find import MissingCompiler, find_compiler
from meshtune.plan.compilers.process import Progress
from meshtune.setup.choices import Decision
from meshtune.setup.coverage import coverage_decisions
from meshtune.setup.fit import Remedy, smallest_machine, try_remedies
from meshtune.setup.search import (
    PATCHES,
    RESERVE,
    ROWS,
    PredictedCandidate,
    apply_overrides,
    filled_candidate,
    memory_limit,
    open_keys,
    predict_candidate,
    rank_candidates,
    workload_of,
)
from meshtune.setup.stage import vision_training
from meshtune.train.report.metrics_log import METRICS, parse_line
from meshtune.translatable import Translatable

CompileStep = Callable[[Recipe, Target], Compiled]


def compiler_for(target: Target, progress: Progress | None = None) -> tuple[CompileStep | None, str]:
    """(a function that compiles a recipe's step for the target, ""), or (None, why there is none and how to get it)."""
    compiler = find_compiler(target.device.platform)
    if isinstance(compiler, MissingCompiler):
        return None, f"{compiler.reason}: {compiler.fix}"

    def compile_step(recipe: Recipe, target: Target) -> Compiled:
        validated = Recipe.model_validate(recipe.model_dump(mode="json"))
        return compile_recipe(validated, target, progress=progress)

    return compile_step, ""


SAMPLE = 2000  # documents that are tokenised
RECENT = 10  # updates of a run by which the lengths of its completions are known
MEAN_LENGTH, MAX_LENGTH = "completions/mean_length", "completions/max_length"


@dataclasses.dataclass(frozen=True)
class Updates:
    """The updates of a whole recipe, None if unknown, and where the number comes from (or why it is unknown)."""

    count: float | None
    source: str


def updates_of(recipe: Recipe) -> Updates:
    """The updates of a recipe: `train.steps`, else counted from its data if these and the tokenizer are local files.

    At most SAMPLE documents are tokenised and packed; the count of a larger data set is scaled up from them.
    """
    if recipe.train.steps is not None:
        return Updates(recipe.train.steps, "train.steps")
    if remote := _remote_paths(recipe):
        return Updates(None, f"the number of updates depends on data that are not local ({', '.join(remote)})")
    try:
        return _count(recipe)
    except UserError as error:
        return Updates(None, f"the number of updates depends on the data, which could not be read: {error.what}")


def _remote_paths(recipe: Recipe) -> list[str]:
    paths = [source.path for source in recipe.data.train if source.path is not None]
    paths.append(recipe.model.tokenizer or recipe.model.path)
    return [path for path in paths if not pathlib.Path(path).expanduser().exists()]


def lengths_of(recipe: Recipe) -> Lengths | None:
    """The lengths of completions that a run in the recipe's output had in its last rollouts; None without such a run.

    Prompts are those of the recipe's data if these are local and few, else as long as they may be.
    """
    rollout, log = recipe.rollout, pathlib.Path(recipe.output).expanduser() / METRICS
    if rollout is None or not log.is_file():
        return None
    lines = [line for text in log.read_bytes().splitlines(keepends=True) if (line := parse_line(text))]
    rollouts = [line for line in lines if line.get("kind") == "train" and MEAN_LENGTH in line][-RECENT:]
    if not rollouts:
        return None
    completion = sum(line[MEAN_LENGTH] for line in rollouts) / len(rollouts)
    longest = max(line[MAX_LENGTH] for line in rollouts)
    prompt = float(recipe.data.max_length - rollout.max_tokens)
    with contextlib.suppress(UserError):
        if not _remote_paths(recipe) and len(_documents(recipe, recipe.data)) <= SAMPLE:
            prompts = prepare_data(recipe, tokenizer_of(recipe.model)[0]).train
            assert isinstance(prompts, PromptLoader)
            prompt = float(prompts.store.lengths.mean())
    return Lengths(prompt, completion, longest, f"measured in {recipe.output}")


def _documents(recipe: Recipe, data: DataSection) -> DocumentList:
    files = None
    if recipe.vision is not None:
        files = PictureFiles(str(cache_folder() / "pictures"), recipe.vision.media_dir)
    kind = STAGES[recipe.stage.kind].dataset_type
    return load_documents(data, seed=recipe.seed, dataset_type=kind, pictures=files).train


def with_row_patches(recipe: Recipe) -> Recipe:
    """The recipe with the patches that a row of a run has (vision.max_patches), where its data say so: these and the
    tokenizer are local files. Those of a large data set are estimated from SAMPLE documents."""
    if recipe.vision is None or recipe.vision.max_patches is not None or _remote_paths(recipe):
        return recipe
    with contextlib.suppress(UserError), _prepared(recipe) as (train, *_):
        if train.pictures is not None:
            return apply_overrides(recipe, {PATCHES: train.pictures.sizes[0]})
    return recipe


def _count(recipe: Recipe) -> Updates:
    epochs = recipe.train.epochs or DEFAULT_EPOCHS
    if recipe.rollout is not None:
        total = len(_documents(recipe, recipe.data))
        rollouts = math.ceil(epochs * total / recipe.rollout.prompts)
        count = rollouts * recipe.rollout.updates * recipe.rollout.iterations
        return Updates(count, f"{epochs:g} epochs of {total:,} prompts")
    with _prepared(recipe) as (train, sampled, total):
        if sampled == total:
            return Updates(train.total_steps(epochs), f"{epochs:g} epochs of the data")
        rows = train.total_steps(1)
    updates = epochs * rows * total / sampled / recipe.train.batch_size
    return Updates(updates, f"{epochs:g} epochs, estimated from {sampled:,} of {total:,} documents")


@contextlib.contextmanager
def _prepared(recipe: Recipe) -> Iterator[tuple[Any, int, int]]:
    """The loader of the recipe's data, how many documents it has, and how many there are: of more than SAMPLE, it has
    a sample, one row per update, so that a fraction of a batch is not rounded up before scaling."""
    tokenizer, _ = tokenizer_of(recipe.model)
    documents = _documents(recipe, recipe.data)
    if (total := len(documents)) <= SAMPLE:
        yield prepare_data(recipe, tokenizer).train, total, total
        return
    data = _sample(recipe.data, documents.sources, SAMPLE / total)
    one_row = {} if recipe.rollout is not None else {"batch_size": 1, "micro_batch": 1}
    sample = recipe.model_copy(update={"data": data, "train": recipe.train.model_copy(update=one_row)})
    with tempfile.TemporaryDirectory(prefix="meshtune-updates-") as cache:
        yield prepare_data(sample, tokenizer, cache=cache).train, len(_documents(recipe, data)), total


def _sample(data: DataSection, sources: Sequence[CheckedSource], fraction: float) -> DataSection:
    """The data section with this fraction of every source's records, and without validation data."""
    train = [
        section.model_copy(update={"cap": max(1, round(len(checked.usable) * fraction))})
        for section, checked in zip(data.train, sources, strict=True)
    ]
    return data.model_copy(update={"train": train, "validation": None})


COMPILED_CANDIDATES = 3  # of a search: the best so many are compiled
SHOWN_CANDIDATES = 12


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """The memory and time of a step on one target. Bytes are per device; `compiled` is None if they are estimated.

    `update_bytes`, `breakdown` and `roofline` are of an update; `rollout` is None for stages that generate nothing, and
    always estimated.
    """

    predicted: PredictedCandidate
    compiled: Compiled | None
    breakdown: dict[str, int]
    host: dict[str, int]
    update_bytes: int
    roofline: Roofline
    collectives: list[Collective]
    memory_limit: int
    rollout: RolloutCost | None

    @property
    def device_bytes(self) -> int:
        """Peak bytes, of an update or of a rollout; with those of the host where the device has the same memory."""
        update = self.update_bytes + (self.host_bytes if self.predicted.candidate.target.device.unified else 0)
        return max(update, 0 if self.rollout is None else self.rollout.device_bytes)

    @property
    def seconds(self) -> float:
        """Seconds of an update with its share of a rollout."""
        return self.roofline.seconds + (0.0 if self.rollout is None else self.rollout.seconds_per_update)

    @property
    def fits(self) -> bool:
        return self.device_bytes <= self.memory_limit and (self.compiled is None or self.compiled.out_of_memory is None)

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


@dataclasses.dataclass(frozen=True)
class PlanReport:
    """The plan of a recipe. `as_given` is for the unchanged recipe, or for the best candidate of a search.

    `table` lists a search's candidates, best first. If `as_given` does not fit, `remedies` were tried, and `remedied`
    is the plan with them if that fits; otherwise `smallest` is the smallest machine that would hold the recipe.
    `updates` are those of the whole recipe; `price` is per hour of one device. `reason` says why no compiler was used.
    `coverage` says what the method adapts or trains, and what runs in place of kernels that the chip does not have,
    `reliability` what failures cost over a given time.
    """

    target: Target
    as_given: StepPlan
    table: list[StepPlan]
    candidates: int
    remedies: list[Remedy]
    remedied: StepPlan | None
    smallest: Target | None
    updates: Updates
    price: float | None
    reserve: float
    reason: str
    coverage: list[Decision]
    reliability: Reliability | None = None

    @property
    def best(self) -> StepPlan:
        """The configuration to run."""
        return self.remedied or self.as_given

    @property
    def run_seconds(self) -> float | None:
        """Seconds of all updates and rollouts, without rewards, compiling, loading and saving."""
        return None if self.updates.count is None else self.updates.count * self.best.seconds

    @property
    def cost(self) -> float | None:
        """The price of all updates on all devices."""
        if self.price is None or self.run_seconds is None:
            return None
        return self.price * self.target.devices * self.run_seconds / 3600


def report_for(
    recipe: Recipe,
    target: Target,
    compile_step: CompileStep | None = None,
    *,
    search: bool = False,
    price: float | None = None,
    reserve: float = RESERVE,
    updates: Updates | None = None,
    lengths: Lengths | None = None,
    reason: str = "",
) -> PlanReport:
    """Plans a recipe for a target with the figures of `compile_step`; without it they are estimated.

    `updates` are those of the whole recipe, by default train.steps; `lengths` those of completions, by default the
    worst case.
    Raises: UserError for an invalid recipe, model or mesh.
    """
    keys = open_keys(recipe, search=search)
    if keys:
        ranked = rank_candidates(recipe, target, keys)
    else:
        ranked = [predict_candidate(recipe, target, workload_of(recipe, target.device.backend, target.device.arch))]
    wanted_fits = COMPILED_CANDIDATES if search else 1
    table: list[StepPlan] = []
    for predicted in ranked[: 2 * wanted_fits]:
        table.append(plan_step(predicted, compile_step, reserve, lengths))
        if sum(plan.fits for plan in table) >= wanted_fits:
            break
    if search:
        table.sort(key=lambda plan: (not plan.fits, plan.seconds if plan.fits else plan.device_bytes))
    best = next((plan for plan in table if plan.fits), table[0])
    remedies: list[Remedy] = []
    remedied, smallest = None, None
    if not best.fits:
        remedies, remedied = _apply_remedies(best, recipe, compile_step, reserve, lengths)
        if remedied is None:
            smallest = smallest_machine(recipe, target)
    workload = best.predicted.candidate.workload
    estimated = (
        [plan_step(predicted, None, reserve, lengths) for predicted in ranked[len(table) : SHOWN_CANDIDATES]]
        if search
        else []
    )
    return PlanReport(
        target,
        best,
        [*table, *estimated] if search else [],
        len(ranked),
        remedies,
        remedied,
        smallest,
        updates or Updates(recipe.train.steps, "train.steps"),
        price,
        reserve,
        reason,
        [
            *coverage_decisions(workload.method, workload.spec, vision_training(workload.recipe)),
            *_kernel_decisions(target.device),
        ],
    )


def _kernel_decisions(device: Device) -> list[Decision]:
    """Describes the operations of a chip without kernels, and which of their costs the plan counts; [] for others."""
    chip = chip_of(device.backend, device.arch)
    reason = None if device.platform in ("tpu", "cpu") else without_triton(chip)
    if reason is None:
        return []
    cost = Translatable(
        "{reason}; scores of attention pass through memory, whose room is counted and time is not", reason=reason
    )
    return [Decision("kernels", Translatable("XLA's own operations"), cost)]


def plan_step(
    predicted: PredictedCandidate,
    compile_step: CompileStep | None,
    reserve: float = RESERVE,
    lengths: Lengths | None = None,
) -> StepPlan:
    """The plan of one candidate with the compiler's figures, or with the estimate where there is no compiler."""
    if predicted.rollout is not None:
        lengths = lengths or predicted.rollout.lengths
        rows = apply_overrides(predicted.recipe, {ROWS: predicted.rollout.rows})
        expected = predict_candidate(rows, predicted.candidate.target, predicted.candidate.workload, lengths=lengths)
        predicted = dataclasses.replace(predicted, roofline=expected.roofline, rollout=expected.rollout)
    candidate = predicted.candidate
    target, limit = candidate.target, memory_limit(candidate.target, reserve)
    if compile_step is None:
        estimated, collectives = predicted.estimate, estimated_collectives(candidate)
        return StepPlan(
            predicted,
            None,
            estimated.breakdown,
            estimated.host,
            estimated.device_bytes,
            predicted.roofline,
            collectives,
            limit,
            predicted.rollout,
        )
    compiled = compile_step(predicted.recipe, target)
    if compiled.collectives is None:
        collectives = estimated_collectives(candidate)
    else:
        collectives = [_collective(record) for record in compiled.collectives]
    dtype = candidate.workload.precision.compute
    work = work_of(filled_candidate(candidate, lengths))
    times = roofline(work, collectives, target, dtype=dtype, trip_count=candidate.loss_chunks)
    breakdown, host = split_by_role(predicted, compiled)
    breakdown["weights"] += (kept := int(reference_bytes(candidate)))
    size = compiled.device_bytes + kept
    return StepPlan(predicted, compiled, breakdown, host, size, times, collectives, limit, predicted.rollout)


def split_by_role(predicted: PredictedCandidate, compiled: Compiled) -> tuple[dict[str, int], dict[str, int]]:
    """The compiler's bytes by role, of the device and of the host.

    Arguments are split by their shapes. Of the temporaries, gradients are what their shapes would take and activations
    are the remainder.
    """
    estimated = predicted.estimate.breakdown
    device = {role: sizes.get("device", 0) for role, sizes in compiled.breakdown.items()}
    trained, adapters = device.get("trained", 0), estimated["adapters"]
    trained_in_full = max(0, trained - adapters)
    temporary = compiled.temp_bytes
    if compiled.out_of_memory is not None:
        temporary = max(0, compiled.device_bytes - sum(device.values()))
    gradients = min(estimated["gradients"], temporary)
    breakdown = {
        "weights": device.get("frozen", 0) + trained_in_full,
        "adapters": trained - trained_in_full,
        "gradients": gradients,
        "optimizer": device.get("optimizer", 0),
        "activations": temporary - gradients,
        "output": max(0, compiled.output_bytes - compiled.alias_bytes),
    }
    unassigned = compiled.device_bytes - sum(breakdown.values())  # the batch, and the compiler's padding
    breakdown["activations"] += max(0, unassigned)
    host = {role: sizes["host"] for role, sizes in compiled.breakdown.items() if sizes.get("host", 0)}
    if compiled.host_temp_bytes:
        host["residual"] = compiled.host_temp_bytes
    return {role: breakdown[role] for role in ROLES}, host


def _collective(record: Mapping[str, Any]) -> Collective:
    return Collective(**{**record, "members": tuple(record["members"])})


def _apply_remedies(
    best: StepPlan, recipe: Recipe, compile_step: CompileStep | None, reserve: float, lengths: Lengths | None
) -> tuple[list[Remedy], StepPlan | None]:
    """The remedies tried, and the plan with all of them if the compiler (or the estimate) says that it fits."""
    remedies = try_remedies(best.predicted, recipe)
    last = next((remedy.predicted for remedy in reversed(remedies) if remedy.predicted is not None), None)
    if last is None or not last.fits:
        return remedies, None
    plan = plan_step(last, compile_step, reserve, lengths)
    return remedies, plan if plan.fits else None


def to_json(report: PlanReport) -> dict[str, object]:
    """The JSON form of a report, as `meshtune plan --json` prints it; docs/plan.md describes the keys."""
    best, times = report.best, report.best.roofline
    compiled, candidate = best.compiled, best.predicted.candidate
    return {
        "target": str(report.target),
        "fits": best.fits,
        "fits_as_it_is": report.as_given.fits,
        "estimated": compiled is None,
        "compiler": compiled.compiler if compiled else None,
        "device_bytes": best.device_bytes,
        "device_capacity": report.target.device.memory,
        "reserve_bytes": report.target.device.memory - best.memory_limit,
        "host_bytes": best.host_bytes,
        "breakdown": best.breakdown,
        "rollout": None if best.rollout is None else _rollout_to_json(best.rollout),
        "host_breakdown": best.host,
        "compile_seconds": compiled.lower_seconds + compiled.compile_seconds if compiled else None,
        "mesh": best.predicted.mesh.sizes,
        "rows": candidate.rows,
        "row_length": candidate.length,
        "accumulation": candidate.accumulation,
        "step_seconds": times.seconds,
        "step_seconds_bound": times.bound,
        "tokens_per_second": times.tokens_per_second,
        "mfu": times.mfu,
        "mfu_bound": times.mfu_bound,
        "bound_by": times.bound_by,
        "roofline": {
            "compute_seconds": times.compute,
            "memory_seconds": times.memory,
            "link_seconds": times.link,
            "network_seconds": times.network,
            "host_seconds": times.host,
            "exposed_seconds": times.exposed,
            "model_flops": times.flops,
            "memory_bytes": times.memory_bytes,
        },
        "steps": report.updates.count,
        "steps_source": report.updates.source,
        "run_seconds": report.run_seconds,
        "cost": report.cost,
        "reliability": None if report.reliability is None else dataclasses.asdict(report.reliability),
        "notes": [choice.text for choice in report.coverage],
        "recipe_overrides": best.predicted.shown_overrides,
        "remedies": [_remedy_to_json(remedy) for remedy in report.remedies],
        "smallest_machine": str(report.smallest) if report.smallest else None,
        "candidates": [_candidate_to_json(plan) for plan in report.table],
    }


def _rollout_to_json(rollout: RolloutCost) -> dict[str, object]:
    derived = {name: getattr(rollout, name) for name in ("device_bytes", "seconds", "tokens_per_second")}
    return dataclasses.asdict(rollout) | derived


def _remedy_to_json(remedy: Remedy) -> dict[str, object]:
    return {
        "remedy": remedy.name,
        "cost": remedy.cost,
        "fits": remedy.fits,
        "device_bytes": remedy.predicted.device_bytes if remedy.predicted else None,
        "refused": remedy.refusal or None,
        "overrides": remedy.overrides,
    }


def _candidate_to_json(plan: StepPlan) -> dict[str, object]:
    return {
        "recipe_overrides": plan.predicted.shown_overrides,
        "fits": plan.fits,
        "estimated": plan.compiled is None,
        "device_bytes": plan.device_bytes,
        "step_seconds": plan.roofline.seconds,
        "tokens_per_second": plan.roofline.tokens_per_second,
        "mfu": plan.roofline.mfu,
        "bound_by": plan.roofline.bound_by,
    }
