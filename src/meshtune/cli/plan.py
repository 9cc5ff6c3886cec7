"""`meshtune plan`: does a run fit a machine that is not here, what to change, how long it takes and what it costs."""

from __future__ import annotations

import json
import pathlib
from typing import TYPE_CHECKING, Annotated

import typer

from meshtune.errors import UserError

if TYPE_CHECKING:
    from rich.status import Status

    from meshtune.plan.hardware import Target
    from meshtune.plan.report import Report


def plan(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE [KEY=VALUE]", help="A YAML recipe, then what to change in it.", show_default=False
        ),
    ],
    target: Annotated[
        list[str],
        typer.Option("--target", help="A machine, as 8xMI300X or 2x8xA100-80. May be given more than once."),
    ],
    search: Annotated[
        bool,
        typer.Option("--search", help="Find mesh, micro-batch and memory savings, as far as the recipe is silent."),
    ] = False,
    price: Annotated[float | None, typer.Option("--price", help="For an hour of one device.", min=0)] = None,
    reserve: Annotated[
        float, typer.Option("--reserve", help="Share of a device's memory that is left free.", min=0, max=0.9)
    ] = 0.06,
    tokens: Annotated[
        float | None, typer.Option("--tokens", help="Tokens to train on in all, if the recipe has no train.steps.")
    ] = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Ask no compiler: figures from a model, within about a tenth.")
    ] = False,
    picture: Annotated[
        pathlib.Path | None, typer.Option("--picture", help="Also draw memory and roofline, as a PNG.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Compile the step train would run for machines that are not here; say what it needs and how fast it is."""
    from meshtune.cli.train import split
    from meshtune.config.load import load_recipe
    from meshtune.plan.hardware import find_target

    targets = [find_target(words) for words in target]
    recipe = load_recipe(*split(arguments))

    from rich.console import Console

    from meshtune.plan.ask import compiler_for
    from meshtune.plan.report import plain, report_for
    from meshtune.plan.words import show

    reports: list[Report] = []
    steps = tokens / (recipe.train.batch_size * recipe.data.max_length) if tokens else None
    waiting = Console(stderr=True, highlight=False)
    for one in targets:
        with waiting.status(f"planning for {one}") as status:

            def progress(stage: str, seconds: float, one: Target = one, status: Status = status) -> None:
                status.update(f"{stage} the step for {one}, {seconds:.0f} s")

            compiles, reason = (None, "asked for") if estimate else compiler_for(one, progress)
            made = report_for(
                recipe, one, compiles, search=search, price=price, reserve=reserve, steps=steps, reason=reason
            )
        reports.append(made)
        if not as_json:
            show(made, arguments)
    if as_json:
        values = [plain(report) for report in reports]
        print(json.dumps(values[0] if len(values) == 1 else values, indent=2))
    if picture is not None:
        from meshtune.plan.picture import draw

        draw(picture, reports)
    _fail_where_nothing_fits(reports)


def _fail_where_nothing_fits(reports: list[Report]) -> None:
    if any(report.best.fits for report in reports):
        return
    machines = {str(report.smallest): None for report in reports if report.smallest}
    raise UserError(
        f"this recipe does not fit {' or '.join(str(report.target) for report in reports)}, whatever is turned",
        where="--target",
        fix=f"the smallest machine that would: {', '.join(machines)}"
        if machines
        else "no machine that is described here would hold it; use shorter rows or a smaller model",
    )
