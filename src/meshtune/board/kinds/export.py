"""Exports and pushes: {"model": RUN, "form": one of FORMS, "type": ..., "merge": bool, "repository": ...}."""

from __future__ import annotations

import re
from typing import Any

from meshtune.board import records
from meshtune.board.kinds.model_argument import checked_model, choice_of
from meshtune.board.kinds.outputs import check_free, output_of, slug
from meshtune.board.kinds.prepared import Prepared
from meshtune.board.workspace import Workspace
from meshtune.errors import UserError
from meshtune.runs.output import MODEL

FORMS = ("adapter", "merged", "gguf", "codes")
GGUF = ("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0")
CODES = ("bitsandbytes", "compressed-tensors", "published")
TOKEN = re.compile(r"[A-Za-z0-9_.-]{1,200}")
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def prepare_export(workspace: Workspace, body: dict[str, Any]) -> Prepared:
    """The command that writes an adapter, a whole model or a GGUF file. Raises: UserError."""
    model = checked_model(workspace, body, "model")
    form, options, suffix = _form(workspace, model, body)
    output = output_of(workspace, body, f"exports/{slug(model)}-{suffix}")
    overwrite = bool(body.get("overwrite"))
    check_free(output, overwrite=overwrite)
    # A GGUF file is written into a folder of its own, beside its Modelfile.
    to = output / f"{output.name.removesuffix('.gguf')}.gguf" if form == "gguf" else output
    arguments = ["export", model, "--to", str(to), *options, *["--overwrite"] * overwrite]
    return Prepared(output.name, tuple(arguments), output=str(output))


def prepare_push(workspace: Workspace, body: dict[str, Any]) -> Prepared:
    """The command that pushes to the hub, with `token`, or else the one that this machine is logged in by.

    Raises: UserError.
    """
    model = checked_model(workspace, body, "model")
    repository = body.get("repository")
    if not isinstance(repository, str) or not REPOSITORY.fullmatch(repository):
        raise UserError(f"{repository!r} is no repository", where="repository", fix="write user/name")
    _, options, _ = _form(workspace, model, body)
    flags = ["--public"] * bool(body.get("public")) + ["--overwrite"] * bool(body.get("overwrite"))
    token = body.get("token") or ""
    if not isinstance(token, str) or (token and not TOKEN.fullmatch(token)):
        raise UserError(
            "this is no token of the hub", where="token", fix="copy it again, as hf_...; it is not shown here"
        )
    secrets = {"HF_TOKEN": token} if token else {}
    return Prepared(repository, ("push", model, repository, *options, *flags), secrets=secrets)


def _form(workspace: Workspace, model: str, body: dict[str, Any]) -> tuple[str, list[str], str]:
    """(form, options of the command, end of a folder's name). A whole model has nothing to merge into GGUF or codes."""
    form = choice_of(body, "form", FORMS) or "adapter"
    is_whole = _is_whole(workspace, model)
    if body.get("form") == "adapter" and is_whole:
        raise UserError(
            "this is a whole model, which has no adapter", where="form", fix="write the whole model, or GGUF"
        )
    wants_merge = form == "merged" or (form in ("gguf", "codes") and bool(body.get("merge")))
    merge = ["--merge"] * (wants_merge and not is_whole)
    if form not in ("gguf", "codes"):
        return form, merge, form
    allowed = GGUF if form == "gguf" else CODES
    kind = choice_of(body, "type", allowed) or allowed[3 if form == "gguf" else 0]
    return form, [*merge, "--gguf" if form == "gguf" else "--format", kind], kind.lower()


def _is_whole(workspace: Workspace, model: str) -> bool:
    """Whether a folder holds a whole model; False for an adapter, a run whose result is one, and an id on the hub."""
    path = workspace.root / model
    result = records.run_json(path).get("result") if records.is_run(path) else None
    return result == MODEL or ((path / "config.json").is_file() and not (path / "adapter_config.json").exists())
