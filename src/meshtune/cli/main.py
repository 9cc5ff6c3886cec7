"""The program `meshtune`: its verbs, and how failures are reported."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from meshtune.cli import (
    adapters,
    data,
    env,
    evaluate,
    export,
    failure,
    families,
    generate,
    import_recipe,
    launch,
    plan,
    rollouts,
    schema,
    serve,
    shard,
    train,
    weights,
)
from meshtune.data.without_torch import leave_torch_out
from meshtune.errors import UserError

app = typer.Typer(
    name="meshtune",
    help="Fine-tune open LLMs on JAX/XLA: Hugging Face models and data in, PEFT adapters or models out.",
    epilog="Start with: meshtune quickstart",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

VERBS = {
    "quickstart": train.quickstart,
    "train": train.train,
    "rewards": rollouts.rewards,
    "rollouts": rollouts.rollouts,
    "serve-rollouts": rollouts.serve_rollouts,
    "generate": generate.generate,
    "chat": generate.chat,
    "serve": serve.serve,
    "board": serve.board,
    "predict": evaluate.predict,
    "eval": evaluate.evaluate,
    "export": export.export,
    "push": export.push,
    "import": import_recipe.import_recipe,
    "plan": plan.plan,
    "shard": shard.shard,
    "families": families.families,
    "schema": schema.schema,
    "doctor": env.doctor,
    "env": env.env,
    "version": env.version,
}
GROUPS = {"adapters": adapters.app, "data": data.app, "launch": launch.app, "weights": weights.app}
for name, verb in VERBS.items():
    app.command(name)(verb)
for name, group in GROUPS.items():
    app.add_typer(group, name=name)


def _print_version(value: bool) -> None:
    if value:
        env.version()
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print Meshtune's version.")
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show the traceback of any error. Works at any place, as does MESHTUNE_DEBUG=1."),
    ] = False,
) -> None:
    """Declares for --help what `main` reads itself, since --debug may stand anywhere."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0 done, 1 a defect in Meshtune, 2 a mistake the user can correct, 130 Ctrl-C."""
    if arguments is None:  # the program, not a caller in Python
        leave_torch_out()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    debug = "--debug" in options or os.environ.get("MESHTUNE_DEBUG", "") not in ("", "0")
    arguments = [argument for argument in options if argument != "--debug"] + arguments[len(options) :]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # torch is not needed, and said to be missing
    if not debug:
        # A hook instead of a broad except: Python ends the program as usual, but prints less.
        sys.excepthook = failure.report_defect
    try:
        typer.main.get_command(app)(arguments, prog_name="meshtune", obj=arguments)
    except (UserError, MemoryError, RuntimeError, OSError) as error:
        explained = failure.explain(error, arguments)
        if debug or explained is None:
            raise
        failure.show(explained)
        sys.exit(2)


if __name__ == "__main__":
    main()
