"""Where a job of a few words writes: a folder that the body names, or a new one after its model."""

from __future__ import annotations

import pathlib
import re
from typing import Any

from meshtune.board.workspace import Workspace
from meshtune.errors import UserError

OWN_FOLDER = "give a folder of its own, as evaluations/first"


def output_of(workspace: Workspace, body: dict[str, Any], default: str) -> pathlib.Path:
    """The folder `body["output"]`, or else `default` with a number behind it where that exists. Raises: UserError."""
    given = body.get("output")
    if given not in (None, ""):
        if not isinstance(given, str) or given.startswith("-") or "{job}" in given:
            raise UserError(f"{given!r} is not a folder", where="output", fix=OWN_FOLDER)
        return workspace.to_write(given, "output")
    number = 1
    while (path := workspace.to_write(default if number == 1 else f"{default}-{number}", "output")).exists():
        number += 1
    return path


def slug(model: str) -> str:
    """The end of a model's path or id, as a name of a folder."""
    return re.sub(r"[^\w.-]+", "-", pathlib.PurePosixPath(model).name).strip("-.") or "model"


def check_free(path: pathlib.Path, *, overwrite: bool) -> None:
    """Raises UserError for a folder that holds something, unless it may be replaced."""
    if path.exists() and not overwrite and (path.is_file() or any(path.iterdir())):
        raise UserError("the output is not empty", where="output", fix="give another one, or tick that it is replaced")
