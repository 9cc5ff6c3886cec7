"""The Model page: models of the hub and of this machine's folders, and the memory that each method takes."""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from meshtune.board.answers import Answer, body_of
from meshtune.board.catalogue import catalogue
from meshtune.board.paths import check_references
from meshtune.board.state import BoardState
from meshtune.errors import UserError

LIST = pathlib.Path(__file__).parents[1] / "models.json"  # made by benchmarks/plans/families.py


def model_routes(state: BoardState) -> list[BaseRoute]:
    """/api/models and what is below it."""
    workspace = state.workspace

    async def list_models(_: Request) -> Response:
        local = [entry for entry in await run_in_threadpool(catalogue, workspace) if entry["kind"] != "adapter"]
        return Answer({"hub": listed(), "local": local})

    async def machine(request: Request) -> Response:
        page = request.query_params.get("page", "")[:100]
        answer = await state.planner.ask({"work": "machine"}, f"machine {page}")
        return Answer(answer, 400 if answer.get("problems") else 200)

    async def memory(request: Request) -> Response:
        body = await body_of(request)
        path = body.get("path")
        if not isinstance(path, str) or not path.strip():
            raise UserError("the model is missing", where="path", fix="give a folder, a GGUF file or a hub id")
        source = await run_in_threadpool(lambda: check_references(workspace, workspace.source(path, "path"), "path"))
        page = str(body.get("page") or "")[:100]
        answer = await state.planner.ask({"work": "methods", "path": source}, f"memory {page}")
        return Answer(answer, 400 if answer.get("problems") else 200)

    return [
        Route("/api/models", list_models),
        Route("/api/models/machine", machine),
        Route("/api/models/memory", memory, methods=["POST"]),
    ]


@functools.cache
def listed() -> list[dict[str, Any]]:
    """{name, id, family, bytes by method} of models that are often tuned."""
    return json.loads(LIST.read_text(encoding="utf-8"))
