"""Evaluations and predictions: {"model": ..., "compare": "base", "tasks": ["arc_easy=FILE"], "data": ..., ...}."""

from __future__ import annotations

import re
from typing import Any

from meshtune.board.kinds.model_argument import checked_model, number_of
from meshtune.board.kinds.outputs import check_free, output_of, slug
from meshtune.board.kinds.prepared import Prepared
from meshtune.board.workspace import Workspace
from meshtune.errors import UserError

NONE = "none"
TASK = re.compile(r"[A-Za-z0-9_][\w.+-]*(=.+)?")


def prepare_eval(workspace: Workspace, body: dict[str, Any]) -> Prepared:
    """The command that measures a model on tasks and held-out records. Raises: UserError."""
    model = checked_model(workspace, body, "model")
    output = output_of(workspace, body, f"evaluations/{slug(model)}")
    arguments = ["eval", model, "--output", str(output)]
    tasks = body.get("tasks") or []
    if not isinstance(tasks, list):
        raise UserError("the tasks must be a list of names", where="tasks", fix='write ["arc_easy"]')
    for task in tasks:
        if not isinstance(task, str) or not TASK.fullmatch(task) or "{job}" in task or "," in task:
            raise UserError(f"{task!r} is not a task", where="tasks", fix="write NAME or NAME=PATH, one a line")
        name, equals, path = task.partition("=")
        if equals:
            source = workspace.to_read(path, "tasks")
            if not source.exists():
                raise UserError(f"there is nothing at {path}", where="tasks", fix="give a file below the root")
            task = f"{name}={workspace.shown(source)}"
        arguments += ["--tasks", task]
    data = body.get("data")
    if data not in (None, ""):
        arguments += ["--data", NONE if data == NONE else checked_model(workspace, body, "data")]
    if (compare := body.get("compare")) not in (None, ""):
        arguments += ["--compare", "base" if compare == "base" else checked_model(workspace, body, "compare")]
    for key, flag, low in (("limit", "--limit", 1), ("num_fewshot", "--num-fewshot", 0), ("rows", "--rows", 1)):
        if (value := number_of(body, key, low)) is not None:
            arguments += [flag, str(value)]
    if (tokens := number_of(body, "max_tokens", 1)) is not None:
        arguments += ["--max-tokens", str(tokens)]
    return _with_output(arguments, output, body)


def prepare_predict(workspace: Workspace, body: dict[str, Any]) -> Prepared:
    """The command that answers the records of a data set. Raises: UserError."""
    model = checked_model(workspace, body, "model")
    data = checked_model(workspace, body, "data")
    output = output_of(workspace, body, f"predictions/{slug(model)}")
    arguments = ["predict", model, "--data", data, "--output", str(output)]
    for key, flag in (("limit", "--limit"), ("max_tokens", "--max-tokens"), ("rows", "--rows")):
        if (value := number_of(body, key, 1)) is not None:
            arguments += [flag, str(value)]
    return _with_output(arguments, output, body)


def _with_output(arguments: list[str], output: Any, body: dict[str, Any]) -> Prepared:
    overwrite = bool(body.get("overwrite"))
    check_free(output, overwrite=overwrite)
    return Prepared(output.name, (*arguments, *["--overwrite"] * overwrite), output=str(output))
