"""Plans a recipe for one target: whether it fits, what would make it fit, how long it takes and what it costs."""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshtune.config.recipe import DEFAULT_EPOCHS, Recipe
from meshtune.config.sections import DataSection
from meshtune.costs.collectives import Collective
from meshtune.costs.estimate import ROLES, estimated_collectives
from meshtune.costs.hardware import Target
from meshtune.costs.roofline import Roofline, roofline, work_of
from meshtune.data.documents import CheckedSource, load_documents
from meshtune.data.prepare import prepare_data
from meshtune.data.tokenizer import tokenizer_of
from meshtune.errors import UserError
from meshtune.objectives.stages import STAGES
from meshtune.plan.compilers import compile_recipe
from meshtune.plan.compilers.compile import Compiled
from meshtune.plan.compilers.find import MissingCompiler, find_compiler
from meshtune.plan.compilers.process import Progress
from meshtune.setup.choices import Decision
from meshtune.setup.coverage import coverage_decisions
from meshtune.setup.fit import Remedy, smallest_machine, try_remedies
from meshtune.setup.search import (
    RESERVE,
    PredictedCandidate,
    memory_limit,
    open_keys,
    predict_candidate,
    rank_candidates,
    workload_of,
)

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


def _count(recipe: Recipe) -> Updates:
    epochs = recipe.train.epochs or DEFAULT_EPOCHS
    tokenizer, _ = tokenizer_of(recipe.model)
    documents = load_documents(recipe.data, seed=recipe.seed, dataset_type=STAGES[recipe.stage.kind].dataset_type).train
    total = len(documents)
    if total <= SAMPLE:
        return Updates(prepare_data(recipe, tokenizer).train.total_steps(epochs), f"{epochs:g} epochs of the data")
    data = _sample(recipe.data, documents.sources, SAMPLE / total)
    with tempfile.TemporaryDirectory(prefix="meshtune-updates-") as cache:
        # One row per update, so that a fraction of a batch is not rounded up before scaling.
        one_row = recipe.train.model_copy(update={"batch_size": 1, "micro_batch": 1})
        sample = prepare_data(recipe.model_copy(update={"data": data, "train": one_row}), tokenizer, cache=cache).train
        rows = sample.total_steps(1)
    sampled = len(load_documents(data, seed=recipe.seed, dataset_type=STAGES[recipe.stage.kind].dataset_type).train)
    updates = epochs * rows * total / sampled / recipe.train.batch_size
    return Updates(updates, f"{epochs:g} epochs, estimated from {sampled:,} of {total:,} documents")


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
    """The memory and time of a step on one target. Bytes are per device; `compiled` is None if they are estimated."""

    predicted: PredictedCandidate
    compiled: Compiled | None
    breakdown: dict[str, int]
    host: dict[str, int]
    device_bytes: int
    roofline: Roofline
    collectives: list[Collective]
    memory_limit: int

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
    `coverage` says what the method adapts or trains.
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

    @property
    def best(self) -> StepPlan:
        """The configuration to run."""
        return self.remedied or self.as_given

    @property
    def run_seconds(self) -> float | None:
        """Seconds of all updates, without compiling, loading and saving."""
        return None if self.updates.count is None else self.updates.count * self.best.roofline.seconds

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
    reason: str = "",
) -> PlanReport:
    """Plans a recipe for a target with the figures of `compile_step`; without it they are estimated.

    `updates` are those of the whole recipe, by default train.steps.
    Raises: UserError for an invalid recipe, model or mesh.
    """
    keys = open_keys(recipe, search=search)
    if keys:
        ranked = rank_candidates(recipe, target, keys)
    else:
        ranked = [predict_candidate(recipe, target, workload_of(recipe, target.device.backend))]
    wanted_fits = COMPILED_CANDIDATES if search else 1
    table: list[StepPlan] = []
    for predicted in ranked[: 2 * wanted_fits]:
        table.append(plan_step(predicted, compile_step, reserve))
        if sum(plan.fits for plan in table) >= wanted_fits:
            break
    if search:
        table.sort(key=lambda plan: (not plan.fits, plan.roofline.seconds if plan.fits else plan.device_bytes))
    best = next((plan for plan in table if plan.fits), table[0])
    remedies: list[Remedy] = []
    remedied, smallest = None, None
    if not best.fits:
        remedies, remedied = _apply_remedies(best, recipe, compile_step, reserve)
        if remedied is None:
            smallest = smallest_machine(recipe, target)
    workload = best.predicted.candidate.workload
    estimated = (
        [plan_step(predicted, None, reserve) for predicted in ranked[len(table) : SHOWN_CANDIDATES]] if search else []
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
        coverage_decisions(workload.method, workload.spec),
    )


def plan_step(predicted: PredictedCandidate, compile_step: CompileStep | None, reserve: float = RESERVE) -> StepPlan:
    """The plan of one candidate with the compiler's figures, or with the estimate where there is no compiler."""
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
        )
    compiled = compile_step(predicted.recipe, target)
    if compiled.collectives is None:
        collectives = estimated_collectives(candidate)
    else:
        collectives = [_collective(record) for record in compiled.collectives]
    dtype = candidate.workload.precision.compute
    times = roofline(work_of(candidate), collectives, target, dtype=dtype, trip_count=candidate.loss_chunks)
    breakdown, host = split_by_role(predicted, compiled)
    return StepPlan(predicted, compiled, breakdown, host, compiled.device_bytes, times, collectives, limit)


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
    best: StepPlan, recipe: Recipe, compile_step: CompileStep | None, reserve: float
) -> tuple[list[Remedy], StepPlan | None]:
    """The remedies tried, and the plan with all of them if the compiler (or the estimate) says that it fits."""
    remedies = try_remedies(best.predicted, recipe)
    last = next((remedy.predicted for remedy in reversed(remedies) if remedy.predicted is not None), None)
    if last is None or not last.fits:
        return remedies, None
    plan = plan_step(last, compile_step, reserve)
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
        "notes": [choice.text for choice in report.coverage],
        "recipe_overrides": best.predicted.shown_overrides,
        "remedies": [_remedy_to_json(remedy) for remedy in report.remedies],
        "smallest_machine": str(report.smallest) if report.smallest else None,
        "candidates": [_candidate_to_json(plan) for plan in report.table],
    }


def _remedy_to_json(remedy: Remedy) -> dict[str, object]:
    return {
        "remedy": remedy.name,
        "cost": remedy.cost,
        "fits": remedy.fits,
        "device_bytes": remedy.predicted.estimate.device_bytes if remedy.predicted else None,
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
