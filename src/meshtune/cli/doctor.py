"""`meshtune doctor`: which compilers for accelerators that are not here are there, and how to get the rest."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MAKERS = {"cuda": "NVIDIA GPUs", "rocm": "AMD GPUs", "tpu": "Google TPUs", "cpu": "this CPU"}
# A device to compile for when a compiler is tried.
TRIED = {"cuda": "8xH100", "rocm": "8xMI300X", "tpu": "8xTPUv5p", "cpu": "2xCPU"}


def doctor(
    install: Annotated[
        list[str] | None,
        typer.Option(
            "--install",
            help="Get the compiler for cuda, rocm, tpu or all of them into a folder of its own; may be given again.",
            show_default=False,
        ),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Compile a small program with each compiler found.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show which accelerators `meshtune plan` can compile for here, and how to get the compilers that are missing."""
    import json

    from rich.console import Console

    from meshtune.plan.compilers.find import Compiler, find_compiler
    from meshtune.plan.compilers.install import EXTRAS, requirements
    from meshtune.plan.compilers.install import install as bring

    console = Console(highlight=False, stderr=as_json)
    wanted = [name for one in install or [] for name in (EXTRAS if one == "all" else [one])]
    for platform in wanted:
        requirements(platform)  # a name that is wrong is said before anything is brought
    for platform in dict.fromkeys(wanted):
        console.print(f"installing {', '.join(requirements(platform))}")
        console.print(f"[bold]installed[/] in {bring(platform)}")
    answers = {platform: find_compiler(platform) for platform in MAKERS}
    tried = {name: _tried(name, console) for name, one in answers.items() if check and isinstance(one, Compiler)}
    if as_json:
        print(json.dumps({name: _plain(one) | _outcome(tried.get(name)) for name, one in answers.items()}, indent=2))
    else:
        console.print(_table(answers, tried))
        for platform, one in answers.items():
            if isinstance(one, Compiler):
                for note in one.notes:
                    _say(console, platform, note)
            else:
                _say(console, platform, f"{one.reason}: {one.fix}")
    failed = {platform: words for platform, (words, _) in tried.items() if words is not None}
    if failed:
        for platform, words in failed.items():
            _say(console, platform, words)
        sys.exit(1)


def _say(console: Console, platform: str, words: str) -> None:
    from rich.text import Text

    console.print(Text.assemble((platform, "bold"), f" {words}"), soft_wrap=True)


def _tried(platform: str, console: Console) -> tuple[str | None, float]:
    """(what went wrong with a small sharded program, or None; seconds)."""
    import time

    from meshtune.errors import UserError
    from meshtune.plan.compilers.process import run
    from meshtune.plan.hardware import find_target

    began = time.monotonic()
    with console.status(f"compiling for {TRIED[platform]}"):
        try:
            run(find_target(TRIED[platform]), "meshtune.plan.compilers.trial:compile_trial")
        except UserError as error:
            return error.what, time.monotonic() - began
    return None, time.monotonic() - began


def _table(answers: Mapping[str, object], tried: dict[str, tuple[str | None, float]]) -> Table:
    from rich.table import Table

    from meshtune.plan.compilers.find import Compiler

    table = Table(title="compilers", title_justify="left")
    for heading in ("for", "state", "packages", "where", *(["tried"] if tried else [])):
        table.add_column(heading)
    for platform, one in answers.items():
        state = "[green]there[/]" if isinstance(one, Compiler) else "[yellow]missing[/]"
        packages = next(iter(str(one).split(", "))) if isinstance(one, Compiler) else ""
        where = str(one.folder or "the environment") if isinstance(one, Compiler) else ""
        row = [f"{platform}: {MAKERS[platform]}", state, packages, where]
        if tried:
            words, seconds = tried.get(platform, ("", 0.0))
            row.append(f"compiles ({seconds:.0f} s)" if words is None else "[red]fails[/]" if words else "")
        table.add_row(*row)
    return table


def _plain(one: object) -> dict[str, object]:
    from meshtune.plan.compilers.find import Compiler, MissingCompiler

    if isinstance(one, Compiler):
        folder = None if one.folder is None else str(one.folder)
        return {"found": True, "packages": one.packages, "folder": folder, "notes": list(one.notes)}
    assert isinstance(one, MissingCompiler)
    return {"found": False, "reason": one.reason, "fix": one.fix}


def _outcome(tried: tuple[str | None, float] | None) -> dict[str, object]:
    return {} if tried is None else {"compiles": tried[0] is None, "seconds": round(tried[1], 1), "said": tried[0]}
