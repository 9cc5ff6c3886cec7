"""What a compiler's process is doing, told to the process that waits for it through a file."""

from __future__ import annotations

import os
import pathlib

FILE = "MESHTUNE_STAGE"


def now(stage: str) -> None:
    """Says what is being done, for `process.run`'s progress; nobody may be listening."""
    if path := os.environ.get(FILE):
        fresh = pathlib.Path(path + ".new")
        fresh.write_text(stage, encoding="utf-8")
        fresh.replace(path)


def read(path: pathlib.Path) -> str:
    """What was last said there."""
    return path.read_text(encoding="utf-8") if path.is_file() else "starting"
