"""`meshtune plan`: whether a run fits a described machine, what to change, how long it takes and what it costs."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import TYPE_CHECKING, Annotated

import typer

from meshtune.cli.recipe_arguments import Arguments, split
from meshtune.errors import UserError

if TYPE_CHECKING:
    from rich.status import Status

    from meshtune.config.recipe import Recipe
    from meshtune.costs.hardware import Target
    from meshtune.plan.report import PlanReport


def plan(
    arguments: Arguments,
    target: Annotated[
        list[str],
        typer.Option("--target", help="A machine, such as 8xMI300X or 2x8xA100-80. May be given more than once."),
    ],
    search: Annotated[
        bool,
        typer.Option("--search", help="Search mesh, micro-batch and memory savings that the recipe does not set."),
    ] = False,
    price: Annotated[float | None, typer.Option("--price", help="Price of one device for an hour.", min=0)] = None,
    reserve: Annotated[
        float, typer.Option("--reserve", help="Share of a device's memory to leave free.", min=0, max=0.9)
    ] = 0.06,
    tokens: Annotated[
        float | None,
        typer.Option("--tokens", help="Total tokens to train on, in place of train.steps or of a count of the data."),
    ] = None,
    estimate: Annotated[
        bool,
        typer.Option("--estimate", help="Use an analytic model, accurate to about a tenth, instead of a compiler."),
    ] = False,
    picture: Annotated[
        pathlib.Path | None, typer.Option("--picture", help="Also draw memory and roofline, as a PNG.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Plan for answering requests with the recipe's model, not for training it.")
    ] = False,
    rows: Annotated[
        list[int] | None, typer.Option("--rows", help="With --serve: requests at once. May be given more than once.")
    ] = None,
    length: Annotated[
        int, typer.Option("--length", help="With --serve: tokens of each request, prompt and answer together.")
    ] = 4096,
    cache: Annotated[
        str | None, typer.Option("--cache", help="With --serve: int8 holds keys and values in 8 bits.")
    ] = None,
) -> None:
    """Compile the step of `train` for machines that are not present; show what memory and time it needs."""
    from meshtune.config.load import load_recipe
    from meshtune.costs.hardware import find_target
    from meshtune.setup.early import check_model

    if cache is not None and not serve:
        raise UserError("training has no cache", where="--cache", fix="give --serve as well, or leave it out")
    targets = [find_target(name) for name in target]
    recipe = load_recipe(*split(arguments))
    check_model(recipe)
    if serve:
        _plan_serving(recipe, targets, rows or [1, 8, 32, 128], length, reserve, cache, as_json)
        return

    from meshtune.plan.backend import compiler_for
    from meshtune.plan.render import print_report
    from meshtune.plan.report import report_for, to_json
    from meshtune.plan.updates import Updates, updates_of
    from meshtune.terminal import console as open_console

    reports: list[PlanReport] = []
    console = open_console(stderr=True)
    if tokens:
        updates = Updates(tokens / (recipe.train.batch_size * recipe.data.max_length), "--tokens")
    else:
        with console.status("counting updates"):
            updates = updates_of(recipe)
    for machine in targets:
        with console.status(f"planning for {machine}") as status:

            def progress(stage: str, seconds: float, machine: Target = machine, status: Status = status) -> None:
                status.update(f"{stage} the step for {machine}, {seconds:.0f} s")

            compile_step, reason = (None, "--estimate is given") if estimate else compiler_for(machine, progress)
            report = report_for(
                recipe,
                machine,
                compile_step,
                search=search,
                price=price,
                reserve=reserve,
                updates=updates,
                reason=reason,
            )
        reports.append(report)
        if not as_json:
            print_report(report, arguments)
    if as_json:
        values = [to_json(report) for report in reports]
        print(json.dumps(values[0] if len(values) == 1 else values, indent=2))
    if picture is not None:
        from meshtune.plan.picture import draw

        draw(picture, reports)
    _raise_if_nothing_fits(reports)


def _plan_serving(
    recipe: Recipe,
    targets: list[Target],
    rows: list[int],
    length: int,
    reserve: float,
    cache: str | None,
    as_json: bool,
) -> None:
    from meshtune.plan.serving import serve_plan
    from meshtune.plan.serving_table import print_serve_plan

    plans = [serve_plan(recipe, machine, rows=rows, length=length, reserve=reserve, cache=cache) for machine in targets]
    if as_json:
        values = [dataclasses.asdict(plan) | {"target": str(plan.target)} for plan in plans]
        print(json.dumps(values[0] if len(values) == 1 else values, indent=2))
        return
    for plan in plans:
        print_serve_plan(plan)


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
