"""The Data page: files that there are, uploads, and a recipe's data as the model will see them."""

from __future__ import annotations

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from meshtune.board.answers import Answer, body_of
from meshtune.board.archives import ZIP, receive_archive
from meshtune.board.recipe_text import content_of
from meshtune.board.routes.recipe import text_of
from meshtune.board.state import BoardState
from meshtune.board.uploads import data_files, receive
from meshtune.board.workspace import check_paths
from meshtune.config.load import load_recipe, silent
from meshtune.config.sections import written_out


def data_routes(state: BoardState) -> list[BaseRoute]:
    """Routes of /api/data and below."""
    workspace = state.workspace

    async def files(_: Request) -> Response:
        return Answer({"files": await run_in_threadpool(data_files, workspace)})

    async def upload(request: Request) -> Response:
        name = request.query_params.get("name", "")
        take = receive_archive if name.lower().endswith(ZIP) else receive
        path = await take(workspace, name, request.stream())
        return Answer({"path": workspace.shown(path), "bytes": path.stat().st_size}, 201)

    def checked(text: str) -> str:
        content = written_out(content_of(text))
        check_paths(workspace, load_recipe({"model": "none", "output": "none", **content}, notify=silent))
        return text

    async def preview(request: Request) -> Response:
        body = await body_of(request)
        text = await run_in_threadpool(checked, text_of(body, "recipe"))
        answer = await state.planner.ask({"work": "data", "recipe": text}, str(body.get("page") or "")[:100])
        return Answer(answer, 400 if answer.get("problems") else 200)

    return [
        Route("/api/data/files", files),
        Route("/api/data/upload", upload, methods=["POST"]),
        Route("/api/data/preview", preview, methods=["POST"]),
    ]
