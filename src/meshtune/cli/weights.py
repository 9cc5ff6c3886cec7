"""`meshtune weights check`: is a model directory whole, and what its config says?"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Annotated

import typer

app = typer.Typer(help="Look at the weights of a model.", no_args_is_help=True)


@app.callback()
def _weights() -> None:
    """Keeps `check` a command of its own while it is the only one."""


@app.command()
def check(
    directory: Annotated[
        pathlib.Path, typer.Argument(metavar="DIR", help="A model directory, as downloaded.", show_default=False)
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Check names, shapes, dtypes and file sizes against config.json, from the files' headers alone."""
    from meshtune.weights.survey import survey

    found = survey(directory)
    if as_json:
        print(json.dumps(dataclasses.asdict(found), indent=2))
        return
    kept = ", ".join(
        name if len(found.dtypes) == 1 else f"{name} ({size / 1e9:,.3f} GB)" for name, size in found.dtypes.items()
    )
    rows = {
        "model": f"{found.family}, {found.layers} layers",
        "tensors": f"{found.tensors:,}",
        "parameters": f"{found.parameters:,}",
        "bytes": f"{found.bytes:,} ({found.bytes / 1e9:,.1f} GB)",
        "files": f"{found.files:,}",
        "dtype": kept,
    }
    if found.unused:
        rows["not needed"] = ", ".join(found.unused[:3]) + (", ..." if len(found.unused) > 3 else "")
    for name, value in rows.items():
        print(f"{name:>12}  {value}")
    print("config.json and weights agree: every tensor is there, whole, in its shape and a floating dtype")
