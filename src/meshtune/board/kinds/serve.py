"""A model to talk to: {"model": PATH or id, "adapters": {NAME: PATH} or ["NAME=PATH"], "quantize": ...}."""

from __future__ import annotations

import pathlib
import re
from typing import Any

from meshtune.board.kinds.model_argument import checked_model, choice_of
from meshtune.board.kinds.prepared import Prepared
from meshtune.board.workspace import Workspace
from meshtune.data.chat_templates import template_names
from meshtune.errors import UserError

TOKEN = "token"
QUANTIZED = ("auto", "nf4", "int8", "fp8", "int4", "none")
DTYPES = ("float32", "bfloat16")


def prepare_serve(workspace: Workspace, body: dict[str, Any]) -> Prepared:
    """The command that serves a model on a free port of this machine alone. Raises: UserError.

    Its token lies in the job's folder; its log says the port once it answers (board.served).
    """
    model = checked_model(workspace, body, "model")
    arguments = ["serve", model, "--port", "0", "--token-file", f"{{job}}/{TOKEN}"]
    adapters = _adapters(body.get("adapters") or {})
    for name in adapters:
        if not re.fullmatch(r"[\w.-]{1,60}", name):
            raise UserError(f"{name!r} is no name for an adapter", where="adapters", fix="use letters and digits")
        arguments += ["--adapter", f"{name}={checked_model(workspace, adapters, name)}"]
    options = {"quantize": QUANTIZED, "dtype": DTYPES, "cache": ("int8",), "chat_template": template_names()}
    for key, values in options.items():
        if (value := choice_of(body, key, values)) is not None:
            arguments += [f"--{key.replace('_', '-')}", value]
    return Prepared(pathlib.PurePosixPath(model).name or model, tuple(arguments))


def _adapters(given: object) -> dict[str, object]:
    """Paths by name. Raises: UserError."""
    if isinstance(given, dict):
        return given
    if not isinstance(given, list):
        raise UserError("the adapters must be lines of NAME=PATH", where="adapters", fix="leave them out")
    adapters: dict[str, object] = {}
    for line in given:
        name, equals, path = line.partition("=") if isinstance(line, str) else ("", "", "")
        if not (name and equals and path):
            raise UserError(f"{line!r} is not NAME=PATH", where="adapters", fix="write polite=runs/polite, one a line")
        if name in adapters:
            raise UserError(f"the name {name!r} is given twice", where="adapters", fix="give each its own")
        adapters[name] = path
    return adapters
