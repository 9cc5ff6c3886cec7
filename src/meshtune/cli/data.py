"""`meshtune data`: a recipe's data as the model will see them, and preparing them before anything is trained."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from meshtune.cli.train import Arguments, split

app = typer.Typer(help="Look at data, and prepare them.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def inspect(
    arguments: Arguments,
    records: Annotated[
        int,
        typer.Option(
            "--records", "-n", min=0, help="Documents to show token by token, and one of each further source."
        ),
    ] = 3,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to show of each.")] = 400,
) -> None:
    """Show tokens, which of them are learned, packing efficiency, lengths, and every warning."""
    from meshtune.config.load import load_recipe
    from meshtune.setup.early import check_inputs

    recipe = load_recipe(*split(arguments))
    check_inputs(recipe)

    from meshtune.data.inspection import inspect_data

    inspect_data(recipe, records=records, tokens=tokens)


@app.command()
def prepare(
    arguments: Arguments,
    shard: Annotated[
        str | None, typer.Option("--shard", metavar="I/N", help="Begin with this share, on one of N machines.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=1, help="Processes, jobs or tasks; by default as many as there are processors."),
    ] = None,
    executor: Annotated[Literal["local", "slurm", "ray"], typer.Option("--executor", help="What runs them.")] = "local",
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="KEY=VALUE", help="For the executor: sbatch's (partition, time), or Ray's."),
    ] = None,
) -> None:
    """Check and tokenise a recipe's data into the cache, from which training opens them. Run again, it goes on."""
    from meshtune.config.load import load_recipe
    from meshtune.errors import UserError, amount
    from meshtune.options import parse_shard
    from meshtune.setup.early import check_inputs
    from meshtune.terminal import console as open_console

    share, options = parse_shard(shard), dict(item.partition("=")[::2] for item in option or [])
    if executor != "local" and shard is not None:
        problem = f"{executor} makes the shards itself"
        raise UserError(problem, where="--shard", fix="leave --shard out, and give --workers")
    recipe = load_recipe(*split(arguments))
    check_inputs(recipe)

    from meshtune.data.executors import prepare_share, run_executor

    console = open_console()
    if executor != "local":
        console.print(run_executor(executor, split(arguments), workers or 1, options))
        return
    prepared = prepare_share(recipe, share, workers, console)
    for report in filter(None, (prepared.report, prepared.validation_report)):
        for warning in report.warnings:
            console.print(f"[yellow]{report.split} data:[/] {warning}")
        tokens = amount(report.counts.tokens, "token")
        console.print(f"{report.split} data: {report.samples:,} {report.noun}, {tokens}")
