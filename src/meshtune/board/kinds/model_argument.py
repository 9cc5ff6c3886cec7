"""Models in the body of a request: a folder inside the workspace, or an id on the hub."""

from __future__ import annotations

import re
from typing import Any

from meshtune.board.workspace import Workspace
from meshtune.errors import UserError
from meshtune.runs.states import BEST

HUB_ID = re.compile(r"(modelscope:)?[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
FIX = "give a folder below the root, or an id on the hub"


def checked_model(workspace: Workspace, body: dict[str, Any], key: str) -> str:
    """The model, adapter or run that `body[key]` names, as an argument of a command. Raises: UserError.

    It never begins with a dash, which would be an option, and never holds `{job}`, which the queue replaces.
    """
    text = body.get(key)
    if not isinstance(text, str) or not text.strip():
        raise UserError("no model is given", where=key, fix=FIX)
    text = text.strip()
    if text.startswith("-") or "{job}" in text:
        raise UserError(f"{text!r} is not a model", where=key, fix=FIX)
    run, mark, state = text.rpartition("@")
    if mark and (state == BEST or state.isdecimal()):  # a state of a run, which its folder keeps
        path = workspace.to_read(run, key)
        if not path.is_dir():
            raise UserError(f"there is no run at {path}", where=key, fix=FIX)
        return text
    local = text.startswith(("/", "~", ".")) or (workspace.root / text).exists()
    if local:
        path = workspace.to_read(text, key)
        if not path.exists():
            raise UserError(f"there is nothing at {path}", where=key, fix=FIX)
        return text
    if not HUB_ID.fullmatch(text):
        raise UserError(f"there is nothing at {text!r}, and it is no id on the hub", where=key, fix=FIX)
    return text


def choice_of(body: dict[str, Any], key: str, options: tuple[str, ...]) -> str | None:
    """`body[key]`, one of `options`; None where it is absent or empty. Raises: UserError."""
    value = body.get(key)
    if value in (None, ""):
        return None
    if value not in options:
        raise UserError(f"{value!r} is none of {', '.join(options)}", where=key, fix="give one of these")
    return value


def number_of(body: dict[str, Any], key: str, low: int, high: int = 10**9) -> int | None:
    """`body[key]`, a whole number from `low` to `high`; None where it is absent. Raises: UserError."""
    value = body.get(key)
    if value in (None, ""):
        return None
    if type(value) is not int or not low <= value <= high:
        raise UserError(f"{value!r} is not a whole number from {low} to {high}", where=key, fix="correct it")
    return value
