"""Models in the body of a request: a folder inside the workspace, or an id on the hub."""

from __future__ import annotations

from typing import Any

from meshtune.board.paths import check_references
from meshtune.board.workspace import HUB_ID, Workspace
from meshtune.errors import UserError
from meshtune.runs.states import BEST, MARK

MODEL_FIX = "give a folder below the root, or an id on the hub"


def checked_model(workspace: Workspace, body: dict[str, Any], key: str) -> str:
    """The model, adapter or run that `body[key]` names, as an argument of a command. Raises: UserError.

    It never begins with a dash, which would be an option, and never holds `{job}`, which the queue replaces.
    """
    text = body.get(key)
    if not isinstance(text, str) or not text.strip():
        raise UserError("no model is given", where=key, fix=MODEL_FIX)
    if text.startswith("-") or "{job}" in text:
        raise UserError(f"{text!r} is not a model", where=key, fix=MODEL_FIX)
    run, mark, state = text.rpartition(MARK)
    is_state = bool(mark) and (state == BEST or (state.isascii() and state.isdecimal()))
    source = check_references(workspace, workspace.source(run if is_state else text, key), key)
    if not (workspace.root / source).exists() and (is_state or not HUB_ID.fullmatch(source)):
        raise UserError(f"there is nothing at {source!r}, and it is no id on the hub", where=key, fix=MODEL_FIX)
    return f"{source}{MARK}{state}" if is_state else source


def choice_of(body: dict[str, Any], key: str, options: tuple[str, ...]) -> str | None:
    """`body[key]`, one of `options`; None where it is absent or empty. Raises: UserError."""
    value = body.get(key)
    if value in (None, ""):
        return None
    if not isinstance(value, str) or value not in options:
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
