"""`meshtune plan`: whether a run fits a described machine, what to change, how long it takes and what it costs."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshtune.cli.expand import expand_options
from meshtune.cli.train import Arguments, split
from meshtune.errors import UserError
from meshtune.options import option

if TYPE_CHECKING:
    from rich.status import Status

    from meshtune.config.recipe import Recipe
    from meshtune.costs.hardware import Target
    from meshtune.plan.report import PlanReport


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """The machine's price and limits, and the form of the output."""

    search: bool = option(False, "Search mesh, micro-batch and memory savings that the recipe does not set.")
    price: float | None = option(None, "Price of one device for an hour.", ge=0)
    reserve: float = option(0.06, "Share of a device's memory to leave free.", ge=0, le=0.9)
    tokens: float | None = option(None, "Total tokens to train on, in place of train.steps or of a count of the data.")
    estimate: bool = option(False, "Use an analytic model, accurate to about a tenth, instead of a compiler.")
    picture: pathlib.Path | None = option(None, "Also draw memory and roofline, as a PNG.")
    as_json: bool = option(False, "Print JSON instead of tables.", flags=("--json",))
    serve: bool = option(False, "Plan for answering requests with the recipe's model, not for training it.")
    length: int = option(4096, "With --serve: tokens of each request, prompt and answer together.")
    slices: int | None = option(None, "TPU slices of the hosts; default: as few as pods allow.", ge=1)
    days: float | None = option(None, "Days that the run takes: what failures cost, the best interval between saves.")
    mtbf: float | None = option(None, "With --days: hours between failures; default: as Llama 3's training had.")
    storage: float = option(10.0, "With --days: GB a second of the shared storage.")
    cache: str | None = option(None, "With --serve: int8 holds keys and values in 8 bits.")


@expand_options()
def plan(
    arguments: Arguments,
    *,
    target: Annotated[
        list[str],
        typer.Option("--target", help="A machine, such as 8xMI300X or 2x8xA100-80. May be given more than once."),
    ],
    rows: Annotated[
        list[int] | None, typer.Option("--rows", help="With --serve: requests at once. May be given more than once.")
    ] = None,
    options: PlanOptions,
) -> None:
    """Compile the step of `train` for machines that are not present; show what memory and time it needs."""
    from meshtune.config.load import load_recipe
    from meshtune.costs.hardware import find_target
    from meshtune.setup.early import check_model

    if options.cache is not None and not options.serve:
        raise UserError("training has no cache", where="--cache", fix="give --serve as well, or leave it out")
    if options.days is None and options.mtbf is not None:
        raise UserError("failures are counted over a time", where="--mtbf", fix="give --days as well, or leave it out")
    targets = [find_target(name, slices=options.slices) for name in target]
    recipe = load_recipe(*split(arguments))
    check_model(recipe)
    if options.serve:
        _plan_serving(recipe, targets, rows or [1, 8, 32, 128], options)
    else:
        _plan_training(recipe, targets, options, arguments)


def _plan_training(recipe: Recipe, targets: list[Target], options: PlanOptions, arguments: list[str]) -> None:
    """Plans and shows the recipe for each of `targets`. Raises UserError if it fits none of them."""
    from meshtune.plan.render import print_report
    from meshtune.plan.report import (
        Updates,
        compiler_for,
        lengths_of,
        report_for,
        to_json,
        updates_of,
        with_row_patches,
    )
    from meshtune.terminal import console as open_console

    reports: list[PlanReport] = []
    console = open_console(stderr=True)
    if options.tokens:
        updates = Updates(options.tokens / (recipe.train.batch_size * recipe.data.max_length), "--tokens")
    else:
        with console.status("counting updates"):
            updates = updates_of(recipe)
    shared = {"search": options.search, "price": options.price, "reserve": options.reserve, "updates": updates}
    shared["lengths"] = lengths_of(recipe)
    recipe = with_row_patches(recipe)
    for machine in targets:
        with console.status(f"planning for {machine}") as status:

            def progress(stage: str, seconds: float, machine: Target = machine, status: Status = status) -> None:
                status.update(f"{stage} the step for {machine}, {seconds:.0f} s")

            compiler = (None, "--estimate is given") if options.estimate else compiler_for(machine, progress)
            report = report_for(recipe, machine, compiler[0], reason=compiler[1], **shared)
            reports.append(report if options.days is None else with_reliability(report, options))
        if not options.as_json:
            print_report(reports[-1], arguments)
    if options.as_json:
        _print_json([to_json(report) for report in reports])
    if options.picture is not None:
        from meshtune.plan.picture import draw

        draw(options.picture, reports)
    _raise_if_nothing_fits(reports)


def with_reliability(report: PlanReport, options: PlanOptions) -> PlanReport:
    """The report with what failures cost in `--days`."""
    from meshtune.costs.reliability import reliability_of

    assert options.days is not None
    mtbf = None if options.mtbf is None else 3600 * options.mtbf
    best, seconds = report.best, 86400 * options.days
    reliability = reliability_of(
        best.predicted.candidate, best.seconds, seconds, mtbf=mtbf, storage=1e9 * options.storage
    )
    return dataclasses.replace(report, reliability=reliability)


def _plan_serving(recipe: Recipe, targets: list[Target], rows: list[int], options: PlanOptions) -> None:
    from meshtune.plan.serving import print_serve_plan, serve_plan

    shared = {"rows": rows, "length": options.length, "reserve": options.reserve, "cache": options.cache}
    plans = [serve_plan(recipe, machine, **shared) for machine in targets]
    if options.as_json:
        _print_json([dataclasses.asdict(plan) | {"target": str(plan.target)} for plan in plans])
        return
    for plan in plans:
        print_serve_plan(plan)


def _print_json(values: list[dict[str, Any]]) -> None:
    print(json.dumps(values[0] if len(values) == 1 else values, indent=2))


def _raise_if_nothing_fits(reports: list[PlanReport]) -> None:
    if any(report.best.fits for report in reports):
        return
    machines = {str(report.smallest): None for report in reports if report.smallest}
    raise UserError(
        f"this recipe does not fit {' or '.join(str(report.target) for report in reports)}, even with all remedies",
        where="--target",
        fix=f"the smallest machine that would hold it: {', '.join(machines)}"
        if machines
        else "no described machine would hold it; use shorter rows or a smaller model",
    )
