"""The reference of the command line is generated, and filed."""

from __future__ import annotations

import pathlib

import typer

from meshtune.cli.main import app
from meshtune.cli.reference import commands


def test_the_filed_reference_of_the_command_line_is_the_current_one():
    page = pathlib.Path(__file__).resolve().parents[2] / "docs/command-line.md"
    current = commands(typer.main.get_command(app), "meshtune")
    assert page.read_text(encoding="utf-8").rstrip().endswith(current.rstrip()), (
        "make it again: meshtune schema --commands (below the page's title)"
    )
