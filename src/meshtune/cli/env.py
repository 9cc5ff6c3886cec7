"""`meshtune env`, `version` and `doctor`: versions, devices and compilers of this machine."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from meshtune.setup.card import Diagnosis

PACKAGES = ("jax", "jaxlib", "optax", "orbax-checkpoint", "transformers", "tokenizers", "datasets", "grain", "numpy")


def version() -> None:
    """Print Meshtune's version."""
    print(f"meshtune {metadata.version('meshtune')}")


def env() -> None:
    """Show the devices, and the versions to name in a report."""
    from meshtune.setup.machine import device_table
    from meshtune.terminal import console

    console().print(device_table())
    print(f"meshtune {metadata.version('meshtune')}, Python {platform.python_version()}, {platform.platform()}")
    print(", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES))


MAKERS = {
    "cuda": "NVIDIA GPUs",
    "rocm": "AMD GPUs",
    "tpu": "Google TPUs",
    "oneapi": "Intel GPUs",
    "cpu": "this CPU",
}
# The target of the check of each compiler.
CHECK_TARGETS = {"cuda": "8xH100", "rocm": "8xMI300X", "tpu": "8xTPUv5p", "oneapi": "1xArcProB60", "cpu": "2xCPU"}


def doctor(
    install: Annotated[
        list[str] | None,
        typer.Option(
            "--install",
            help="Install the compiler for cuda, rocm, tpu, oneapi or all into a folder of its own; may be repeated.",
            show_default=False,
        ),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Compile a small program with each compiler found.")] = False,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            help="Say what this device needs, has and lacks, such as 'RX 9070 XT', in place of the one that is here.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what the device needs, has and lacks, and which devices `meshtune plan` can compile for here."""
    import json

    if target is not None:
        _diagnose_target(target, as_json)
        return
    from meshtune.plan.compilers.find import EXTRAS, Compiler, find_compiler, requirements
    from meshtune.plan.compilers.find import install as install_compiler
    from meshtune.terminal import console as open_console

    console = open_console(stderr=as_json)
    platforms = [name for choice in install or [] for name in (EXTRAS if choice == "all" else [choice])]
    for name in platforms:
        requirements(name)  # reports an unknown name before anything is installed
    for name in dict.fromkeys(platforms):
        console.print(f"installing {', '.join(requirements(name))}")
        console.print(f"[bold]installed[/] in {install_compiler(name)}")
    compilers = {name: find_compiler(name) for name in MAKERS}
    checks = {
        name: _check(name, console) for name, compiler in compilers.items() if check and isinstance(compiler, Compiler)
    }
    if as_json:
        entries = {name: _entry(compiler) | _outcome(checks.get(name)) for name, compiler in compilers.items()}
        print(json.dumps({"device": _diagnosis_entry(_diagnosis_here()), "compilers": entries}, indent=2))
    else:
        diagnosis = _diagnosis_here()
        _print_findings(console, diagnosis)
        console.print(_table(compilers, checks))
        for name, compiler in compilers.items():
            if isinstance(compiler, Compiler):
                for note in compiler.notes:
                    _print_note(console, name, note)
            else:
                _print_note(console, name, f"{compiler.reason}: {compiler.fix}")
        _print_next(console, diagnosis)
    failures = {name: failure for name, (failure, _) in checks.items() if failure is not None}
    for name, failure in failures.items():
        _print_note(console, name, failure)
    if failures:
        sys.exit(1)


def _diagnose_target(name: str, as_json: bool) -> None:
    import json

    from meshtune.costs.hardware import known_devices, require_device
    from meshtune.setup.card import diagnose
    from meshtune.terminal import console

    diagnosis = diagnose(require_device(name, known_devices()), attached=False)
    if as_json:
        print(json.dumps(_diagnosis_entry(diagnosis), indent=2))
    else:
        _print_findings(console(), diagnosis)
        _print_next(console(), diagnosis)


def _diagnosis_here() -> Diagnosis:
    from meshtune.setup.card import diagnose
    from meshtune.setup.machine import attached_device

    return diagnose(attached_device(), attached=True)


def _diagnosis_entry(diagnosis: Diagnosis) -> dict[str, object]:
    findings = [{"about": found.about, "text": found.text, "state": found.state} for found in diagnosis.findings]
    return {"name": diagnosis.device.name, "findings": findings, "ready": not diagnosis.next, "next": diagnosis.next}


def _print_findings(console: Console, diagnosis: Diagnosis) -> None:
    from rich.table import Table
    from rich.text import Text

    device = diagnosis.device
    kind = f" ({device.kind})" if device.kind and device.kind != device.name else ""
    table = Table(title=f"{device.name}{kind}", title_justify="left", show_header=False)
    colours = {"good": "green", "bad": "red", "note": ""}
    for finding in diagnosis.findings:
        table.add_row(finding.about, Text(finding.text, colours[finding.state]))
    console.print(table)


def _print_next(console: Console, diagnosis: Diagnosis) -> None:
    _print_note(console, "next:" if diagnosis.next else "ready:", diagnosis.next or "meshtune quickstart")


def _print_note(console: Console, platform: str, note: str) -> None:
    from rich.text import Text

    console.print(Text.assemble((platform, "bold"), f" {note}"), soft_wrap=True)


def _check(platform: str, console: Console) -> tuple[str | None, float]:
    """Compiles a small sharded program: (the failure, or None; seconds)."""
    import time

    from meshtune.costs.hardware import find_target
    from meshtune.errors import UserError
    from meshtune.plan.compilers.process import run

    start = time.monotonic()
    with console.status(f"compiling for {CHECK_TARGETS[platform]}"):
        try:
            run(find_target(CHECK_TARGETS[platform]), "meshtune.plan.compilers.trial:compile_trial")
        except UserError as error:
            return error.what, time.monotonic() - start
    return None, time.monotonic() - start


def _table(compilers: Mapping[str, object], checks: dict[str, tuple[str | None, float]]) -> Table:
    from rich.table import Table

    from meshtune.plan.compilers.find import Compiler

    table = Table(title="compilers", title_justify="left")
    for heading in ("for", "state", "packages", "where", *(["check"] if checks else [])):
        table.add_column(heading, overflow="fold")
    for name, compiler in compilers.items():
        is_found = isinstance(compiler, Compiler)
        state = "[green]installed[/]" if is_found else "[yellow]missing[/]"
        packages = next(iter(str(compiler).split(", "))) if is_found else ""
        where = str(compiler.folder or "the environment") if is_found else ""
        row = [f"{name}: {MAKERS[name]}", state, packages, where]
        if checks:
            failure, seconds = checks.get(name, ("", 0.0))
            row.append(f"compiles ({seconds:.0f} s)" if failure is None else "[red]fails[/]" if failure else "")
        table.add_row(*row)
    return table


def _entry(compiler: object) -> dict[str, object]:
    from meshtune.plan.compilers.find import Compiler, MissingCompiler

    if isinstance(compiler, Compiler):
        folder = None if compiler.folder is None else str(compiler.folder)
        return {"found": True, "packages": compiler.packages, "folder": folder, "notes": list(compiler.notes)}
    assert isinstance(compiler, MissingCompiler)
    return {"found": False, "reason": compiler.reason, "fix": compiler.fix}


def _outcome(check: tuple[str | None, float] | None) -> dict[str, object]:
    return {} if check is None else {"compiles": check[0] is None, "seconds": round(check[1], 1), "failure": check[0]}
