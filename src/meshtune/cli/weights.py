"""`meshtune weights check`: whether a model directory is complete and agrees with its config."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Annotated

import typer

app = typer.Typer(help="Look at the weights of a model.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _weights() -> None:
    """Keeps `check` a subcommand while it is the only one."""


@app.command()
def check(
    directory: Annotated[
        pathlib.Path, typer.Argument(metavar="DIR", help="A model directory, as downloaded.", show_default=False)
    ],
    values: Annotated[
        bool, typer.Option("--values", help="Read all numbers too, and name tensors with NaN or infinity.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check names, shapes, dtypes and file sizes against config.json, from the files' headers only."""
    from meshtune.weights.finite import require_finite
    from meshtune.weights.inspect import inspect_model
    from meshtune.weights.passed_through import list_parts

    report = inspect_model(directory)
    if values:
        require_finite(directory)
    if as_json:
        print(json.dumps(dataclasses.asdict(report), indent=2))
        return
    dtypes = ", ".join(
        name if len(report.dtypes) == 1 else f"{name} ({size / 1e9:,.3f} GB)" for name, size in report.dtypes.items()
    )
    rows = {
        "model": f"{report.family}, {report.layers} layers",
        "tensors": f"{report.tensors:,}",
        "parameters": f"{report.parameters:,}",
        "bytes": f"{report.bytes:,} ({report.bytes / 1e9:,.1f} GB)",
        "files": f"{report.files:,}",
        "dtype": dtypes,
    }
    if report.composite is not None:
        rows["model"] = f"text model of {report.composite}: {rows['model']}"
    if report.passed_through:
        rows["passed through"] = list_parts(report.passed_through)
    if report.unused:
        rows["not needed"] = ", ".join(report.unused[:3]) + (", ..." if len(report.unused) > 3 else "")
    for name, value in rows.items():
        print(f"{name:>14}  {value}")
    print("config.json and weights agree: every tensor is there, whole, in its shape and a floating dtype")
    if values:
        print("every number is finite")
