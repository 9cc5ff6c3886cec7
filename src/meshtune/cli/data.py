"""`meshtune data`: a recipe's data as the model will see them, preparing them, and records that a teacher makes."""

from __future__ import annotations

import pathlib
from typing import Annotated, Literal

import typer

from meshtune.cli.expand import expand_options
from meshtune.cli.replicas import Sharing, run_shared
from meshtune.cli.train import Arguments, split
from meshtune.errors import UserError
from meshtune.options import parse_shard

app = typer.Typer(
    help="Look at data, prepare them, and make data from documents.", no_args_is_help=True, rich_markup_mode=None
)


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
    """Show tokens, which of them are learned, packing efficiency, lengths, and every warning.

    Of a folder that `data generate` wrote: its records with their sources, and what filters dropped.
    """
    if len(arguments) == 1 and (pathlib.Path(arguments[0]) / "generated.json").is_file():
        from meshtune.synth.run import show_generated

        show_generated(pathlib.Path(arguments[0]), records)
        return
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
    """Check and tokenise a recipe's data into the cache, from which training opens them. A second run continues."""
    from meshtune.config.load import load_recipe
    from meshtune.errors import amount
    from meshtune.setup.early import check_inputs
    from meshtune.terminal import console as open_console

    share, options = parse_shard(shard), dict[str, str]()
    for item in option or []:
        key, _, options[key] = item.partition("=")
    if executor != "local" and shard is not None:
        problem = f"{executor} makes the shards itself"
        raise UserError(problem, where="--shard", fix="leave --shard out, and give --workers")
    recipe = load_recipe(*split(arguments))
    check_inputs(recipe)

    from meshtune.data.executors import prepare_share, run_executor

    console = open_console()
    if executor != "local" and (submitted := run_executor(executor, split(arguments), workers or 1, options)):
        console.print(submitted)
        return
    prepared = prepare_share(recipe, share, workers, console)  # after Ray it opens the data, or makes the rest
    for report in filter(None, (prepared.report, prepared.validation_report)):
        for warning in report.warnings:
            console.print(f"[yellow]{report.split} data:[/] {warning}")
        tokens = amount(report.counts.tokens, "token")
        console.print(f"{report.split} data: {report.samples:,} {report.noun}, {tokens}")


@app.command()
@expand_options()
def generate(
    context: typer.Context,
    arguments: Arguments,
    *,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the records in the output.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Move records in the output aside.")] = False,
    price: Annotated[
        str | None,
        typer.Option("--price", help="Dollars for a million tokens of the teacher's prompts and answers: 0.15/0.60."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show first prompts and the most that it can take; ask nothing.")
    ] = False,
    sharing: Sharing,
) -> None:
    """Make records from documents, examples, tools or pictures by asking a teacher."""
    from meshtune.config.data_recipe import load_data_recipe

    recipe_file, overrides = split(arguments)
    if recipe_file is None:
        fix = "meshtune data generate RECIPE.yaml; docs/generate-data.md shows one"
        raise UserError("no recipe is given", fix=fix)
    if price is not None:
        prompt, _, answer = price.partition("/")
        overrides = [*overrides, f"teacher.price.prompt={prompt}", f"teacher.price.answer={answer or prompt}"]
    recipe = load_data_recipe(recipe_file, overrides)

    from meshtune.synth.plan import show_plan
    from meshtune.synth.run import check_shared, generate_data

    if dry_run:
        show_plan(recipe)
        return
    if sharing.replicas > 1:
        check_shared(recipe)
    output, devices = pathlib.Path(recipe.output), 0 if recipe.teacher.is_server else 1
    flags = {"resume": resume, "overwrite": overwrite}
    if not run_shared(context, sharing, output, devices=devices, output_argument="output=", **flags):
        generate_data(recipe, shard=parse_shard(sharing.shard), **flags)


@app.command()
def template(
    name: Annotated[str | None, typer.Argument(help="The kind to print, as a start for your own.")] = None,
) -> None:
    """List the kinds that `data generate` knows, or print the template of one."""
    from meshtune.config.data_recipe import load_template, template_names, template_text

    if name is None:
        for entry in template_names():
            print(f"{entry:12} {load_template(entry).about}")
        return
    load_template(name)
    print(template_text(name), end="")
