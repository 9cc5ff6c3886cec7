"""Output for people: consoles that show names and paths whole, colours, and the command that runs this program."""

from __future__ import annotations

import io
import os
import pathlib
import shlex
import shutil
import sys
from typing import Any

from rich.console import Console

INK, GRID = "#1f2933", "#e4e7eb"  # colours of text and grid lines in pictures
WIDE = 200  # columns where there is no terminal: a file or a pipe has no edge at which to cut
CELL = 120  # columns of the text under a notebook's cell


def console(*, stderr: bool = False, quiet: bool = False, soft_wrap: bool = False) -> Console:
    """A console that guesses no highlights. Tables of a pipe or a file are not squeezed into 80 columns.

    In a notebook it prints coloured text and moves no cursor: rich's own output there needs ipywidgets.
    """
    options: dict[str, Any] = {"stderr": stderr, "quiet": quiet, "highlight": False, "soft_wrap": soft_wrap}
    if in_notebook():
        return Console(**options, force_jupyter=False, force_terminal=False, color_system="standard", width=CELL)
    opened = Console(**options)
    if not opened.is_terminal and "COLUMNS" not in os.environ:
        opened.width = WIDE
    return opened


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook: Jupyter, Colab, Kaggle or Databricks."""
    return Console(file=io.StringIO()).is_jupyter


def command(*arguments: str) -> str:
    """A shell command that runs this installation of Meshtune with `arguments`, from the current directory.

    `meshtune` alone where the shell would find this very program by that name, else its path.
    """
    return " ".join([_program(), *map(shlex.quote, arguments)])


def _program() -> str:
    beside = pathlib.Path(sys.executable).with_name("meshtune")
    on_path = shutil.which("meshtune")
    if not beside.exists():
        return "meshtune" if on_path else f"{shlex.quote(sys.executable)} -m meshtune"
    if on_path is not None and os.path.realpath(on_path) == os.path.realpath(beside):
        return "meshtune"
    relative = os.path.relpath(beside)
    return shlex.quote(str(beside) if relative.startswith("..") else relative)
