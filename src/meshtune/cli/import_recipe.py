"""`meshtune import`: another tool's recipe, as ours."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Annotated

import typer

from meshtune.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from meshtune.config.foreign.importer import Translation

REFUSED = 2
TITLES = {
    "translated": "translated",
    "differs": "translated, with a difference",
    "unknown": "unknown",
    "refused": "refused",
}


def import_recipe(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A recipe of LLaMA-Factory or axolotl, or arguments of TRL (YAML, or a script).",
            show_default=False,
        ),
    ],
    to: Annotated[
        str | None, typer.Option("--to", help="The file to write; default: standard output.", show_default=False)
    ] = None,
    devices: Annotated[
        int, typer.Option("--devices", help="Devices that FILE is started on: its batch is counted for each of them.")
    ] = 1,
    trl: Annotated[bool, typer.Option("--trl", help="FILE holds arguments of TRL.")] = False,
    trainer: Annotated[
        str | None,
        typer.Option("--trainer", help="TRL's trainer: sft, dpo, kto, reward, orpo or cpo.", show_default=False),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what --to names.")] = False,
) -> None:
    """Translate another tool's recipe.

    Reports what became of each key. Exits with 2, and writes nothing, if a key is refused or unknown.
    """
    from meshtune import terminal
    from meshtune.config.foreign.importer import translate

    target = None if to is None else pathlib.Path(to).expanduser()
    if target is not None and target.exists() and not overwrite:
        raise UserError("the file exists", where=to, fix="name another, or add --overwrite")
    translation = translate(file, devices=devices, is_trl=trl or trainer is not None, trainer=trainer)
    console = terminal.console(stderr=True)
    _report(translation, console)
    if translation.refused:
        count = len(translation.refused)
        console.print(f"refused: {count} key{'s' * (count != 1)} of {file}; nothing was written", style="bold red")
        raise typer.Exit(REFUSED)
    files = translation.written_files(target)
    for path, text in files.items():
        if target is None:
            typer.echo(text, nl=False)
        else:
            _write(path, text, overwrite)
    if target is not None:
        run = f"meshtune train {target}"
        console.print(f"written: {', '.join(map(str, files))}; run it: {run}", markup=False, soft_wrap=True)


def _report(translation: Translation, console: Console) -> None:
    from meshtune.config.foreign.detect import TITLES as TOOLS

    console.print(f"{translation.source}: {TOOLS[translation.tool]}", markup=False, style="bold")
    for verdict, title in TITLES.items():
        findings = [finding for finding in translation.findings if finding.verdict == verdict]
        if findings:
            console.print(f"{title}:", style="bold")
        for finding in findings:
            line = translation.lines.get(finding.key)
            where = f" (line {line})" if line and finding in translation.refused else ""
            result = f"-> {finding.to}" if finding.to else ""
            text = "; ".join(filter(None, (result, finding.note, finding.fix)))
            console.print(f"  {finding.key or 'the recipe'}{where}: {text}", markup=False, soft_wrap=True)
    if unused := [finding.key for finding in translation.findings if finding.verdict == "no effect"]:
        console.print(f"without effect here: {', '.join(unused)}", markup=False, soft_wrap=True)
    for remark in translation.draft.remarks:
        console.print(f"  note: {remark}", markup=False, soft_wrap=True)


def _write(path: pathlib.Path, text: str, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise UserError("the file exists", where=str(path), fix="name another with --to, or add --overwrite")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as problem:
        raise UserError(
            f"the file cannot be written: {problem.strerror}", where=str(path), fix="name another"
        ) from problem
