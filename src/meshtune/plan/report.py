"""The answer of `meshtune plan` for one target: does it fit, what would make it, how long and how much."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshtune.config.recipe import Recipe
from meshtune.plan import knobs
from meshtune.plan.case import base_of
from meshtune.plan.collectives import Collective
from meshtune.plan.compilers.compiled import Compiled
from meshtune.plan.estimate import ROLES, exchanges
from meshtune.plan.hardware import Target
from meshtune.plan.roofline import Roofline, roofline
from meshtune.plan.search import RESERVE, Option, limit, open_keys, option, options
from meshtune.plan.work import work_of

LEADERS = 3  # of a search that are compiled


@dataclasses.dataclass(frozen=True)
class Answer:
    """One configuration on one target. Bytes are of one device; `compiled` is None where they are estimated."""

    option: Option
    compiled: Compiled | None
    breakdown: dict[str, int]
    host: dict[str, int]
    device_bytes: int
    roofline: Roofline
    collectives: list[Collective]
    limit: int

    @property
    def fits(self) -> bool:
        return self.device_bytes <= self.limit and (self.compiled is None or self.compiled.out_of_memory is None)

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


@dataclasses.dataclass(frozen=True)
class Report:
    """`answer` is for the recipe as it is, or for the best that was found; `table` is a search's, best first.

    `knobs` were tried because `answer` does not fit; `mended` is what became of them if that fits. `smallest` is the
    smallest machine for a recipe that no knob makes fit. `steps` are the updates of the whole recipe, None if they
    depend on data; `price` is for an hour of one device.
    """

    target: Target
    answer: Answer
    table: list[Answer]
    candidates: int
    knobs: list[knobs.Tried]
    mended: Answer | None
    smallest: Target | None
    steps: float | None
    price: float | None
    reserve: float
    reason: str

    @property
    def best(self) -> Answer:
        """What to run."""
        return self.mended or self.answer

    @property
    def run_seconds(self) -> float | None:
        """Of all updates; compiling, loading and saving come on top."""
        return None if self.steps is None else self.steps * self.best.roofline.seconds

    @property
    def cost(self) -> float | None:
        if self.price is None or self.run_seconds is None:
            return None
        return self.price * self.target.devices * self.run_seconds / 3600


Compiles = Any  # (recipe, target) -> Compiled, or None where there is no compiler


def report_for(
    recipe: Recipe,
    target: Target,
    compiles: Compiles = None,
    *,
    search: bool = False,
    price: float | None = None,
    reserve: float = RESERVE,
    steps: float | None = None,
    reason: str = "",
) -> Report:
    """Plans a recipe for a target. `compiles` gives the compiler's figures; without it they are estimated.

    `reason` says why there is no compiler. Raises: UserError for whatever is wrong with recipe, model or mesh.
    """
    keys = open_keys(recipe, search=search)
    ranked = options(recipe, target, keys) if keys else [option(recipe, target, base_of(recipe, target.device.backend))]
    most = LEADERS if search else 1
    table: list[Answer] = []
    for one in ranked[: 2 * most]:
        answer = answered(one, compiles, reserve)
        table.append(answer)
        if sum(entry.fits for entry in table) >= most:
            break
    if search:
        table = sorted(table, key=lambda one: (not one.fits, one.roofline.seconds if one.fits else one.device_bytes))
    best = next((one for one in table if one.fits), table[0])
    turned: list[knobs.Tried] = []
    mended, smallest = None, None
    if not best.fits:
        turned, mended = _mended(best, recipe, compiles, reserve)
        if mended is None:
            smallest = knobs.smallest(recipe, target)
    rest = [answered(one, None, reserve) for one in ranked[len(table) : 12]] if search else []
    return Report(
        target,
        best,
        [*table, *rest] if search else [],
        len(ranked),
        turned,
        mended,
        smallest,
        steps if steps is not None else recipe.train.steps,
        price,
        reserve,
        reason,
    )


def answered(one: Option, compiles: Compiles, reserve: float = RESERVE) -> Answer:
    """An option with the compiler's figures, or with the estimate where there is none."""
    case, most = one.case, limit(one.case.target, reserve)
    if compiles is None:
        found = one.estimate
        return Answer(one, None, found.breakdown, found.host, found.device_bytes, one.roofline, exchanges(case), most)
    compiled: Compiled = compiles(one.recipe, case.target)
    unread = compiled.collectives is None
    messages = exchanges(case) if unread else [_collective(record) for record in compiled.collectives or []]
    turns = -(-case.length // max(1, case.loss_chunk))
    times = roofline(work_of(case), messages, case.target, dtype=case.base.precision.compute, turns=turns)
    breakdown, host = split(one, compiled)
    return Answer(one, compiled, breakdown, host, compiled.device_bytes, times, messages, most)


def split(one: Option, compiled: Compiled) -> tuple[dict[str, int], dict[str, int]]:
    """The compiler's bytes by role. Arguments are what their shapes say; gradients are what theirs would take, and
    activations the rest of what the program makes on its way."""
    estimated = one.estimate.breakdown
    roles = compiled.breakdown
    device = {role: sizes.get("device", 0) for role, sizes in roles.items()}
    trained, adapters = device.get("trained", 0), estimated["adapters"]
    full = max(0, trained - adapters)
    temporary = compiled.temp_bytes
    if compiled.out_of_memory is not None:
        temporary = max(0, compiled.device_bytes - sum(device.values()))
    gradients = min(estimated["gradients"], temporary)
    found = {
        "weights": device.get("frozen", 0) + full,
        "adapters": trained - full,
        "gradients": gradients,
        "optimizer": device.get("optimizer", 0),
        "activations": temporary - gradients,
        "output": max(0, compiled.output_bytes - compiled.alias_bytes),
    }
    rest = compiled.device_bytes - sum(found.values())  # the batch, and padding of the compiler's own
    found["activations"] += max(0, rest)
    host = {role: sizes.get("host", 0) for role, sizes in roles.items() if sizes.get("host", 0)}
    if compiled.host_temp_bytes:
        host["residual"] = compiled.host_temp_bytes
    return {role: found[role] for role in ROLES}, host


def _collective(record: dict[str, Any]) -> Collective:
    return Collective(**{**record, "members": tuple(record["members"])})


def plain(report: Report) -> dict[str, Any]:
    """The JSON form of a report."""
    best, times = report.best, report.best.roofline
    compiled = best.compiled
    return {
        "target": str(report.target),
        "fits": best.fits,
        "fits_as_it_is": report.answer.fits,
        "estimated": compiled is None,
        "compiler": compiled.compiler if compiled else None,
        "device_bytes": best.device_bytes,
        "device_capacity": report.target.device.memory,
        "reserve_bytes": report.target.device.memory - best.limit,
        "host_bytes": best.host_bytes,
        "breakdown": best.breakdown,
        "host_breakdown": best.host,
        "compile_seconds": compiled.lower_seconds + compiled.compile_seconds if compiled else None,
        "mesh": best.option.mesh.sizes,
        "rows": best.option.case.rows,
        "row_length": best.option.case.length,
        "accumulation": best.option.case.accumulation,
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
            "waited_seconds": times.waited,
            "model_flops": times.flops,
            "memory_bytes": times.memory_bytes,
        },
        "steps": report.steps,
        "run_seconds": report.run_seconds,
        "cost": report.cost,
        "recipe_overrides": best.option.said,
        "knobs": [
            {
                "knob": one.name,
                "cost": one.cost,
                "fits": one.fits,
                "device_bytes": one.option.estimate.device_bytes if one.option else None,
                "refused": one.refusal or None,
                "overrides": one.overrides,
            }
            for one in report.knobs
        ],
        "smallest_machine": str(report.smallest) if report.smallest else None,
        "candidates": [_row(one) for one in report.table],
    }


def _row(one: Answer) -> dict[str, Any]:
    return {
        "recipe_overrides": one.option.said,
        "fits": one.fits,
        "estimated": one.compiled is None,
        "device_bytes": one.device_bytes,
        "step_seconds": one.roofline.seconds,
        "tokens_per_second": one.roofline.tokens_per_second,
        "mfu": one.roofline.mfu,
        "bound_by": one.roofline.bound_by,
    }


def _mended(
    best: Answer, recipe: Recipe, compiles: Compiles, reserve: float
) -> tuple[list[knobs.Tried], Answer | None]:
    """The knobs, and the configuration they end in if the compiler (or the estimate) lets it fit."""
    turned = knobs.tried(best.option, recipe)
    last = next((one.option for one in reversed(turned) if one.option is not None), None)
    if last is None or not last.fits:
        return turned, None
    answer = answered(last, compiles, reserve)
    return turned, answer if answer.fits else None
