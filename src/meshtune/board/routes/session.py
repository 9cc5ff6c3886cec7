"""Routes of signing in, of the machine and of the page's files."""

from __future__ import annotations

import dataclasses
import hmac
import importlib.metadata
import pathlib
import platform
import shutil

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from meshtune.board.answers import Answer, body_of
from meshtune.board.devices import devices
from meshtune.board.job import SCHEDULERS
from meshtune.board.state import BoardState
from meshtune.serve.guard import ApiError, cookie_of

SESSION = "/api/session"
MONTH = 30 * 24 * 3600


def session_routes(state: BoardState) -> list[BaseRoute]:
    """POST /api/session {token}, and /sign-in?token=..., the link that the command prints."""

    def check(token: object) -> None:
        valid = isinstance(token, str) and state.token is not None
        if not valid or not hmac.compare_digest(str(token).encode(), str(state.token).encode()):
            raise ApiError(401, "the token is wrong", param="token")

    def signed_in(response: Response) -> Response:
        assert state.token is not None
        value = cookie_of(state.token)
        response.set_cookie(state.cookie, value, max_age=MONTH, httponly=True, samesite="strict")
        return response

    async def sign_in(request: Request) -> Response:
        check((await body_of(request)).get("token"))
        return signed_in(Answer({}))

    async def follow_link(request: Request) -> Response:
        check(request.query_params.get("token"))
        return signed_in(RedirectResponse("./", 303))

    return [Route(SESSION, sign_in, methods=["POST"]), Route("/sign-in", follow_link)]


def machine_routes(state: BoardState) -> list[BaseRoute]:
    """GET /api/machine."""

    async def machine(_: Request) -> Response:
        usage = shutil.disk_usage(state.workspace.root)
        return Answer(
            {
                "version": importlib.metadata.version("meshtune"),
                "host": platform.node(),
                "root": str(state.workspace.root),
                "readable": [str(path) for path in state.workspace.readable],
                "devices": [dataclasses.asdict(device) for device in await run_in_threadpool(devices)],
                "schedulers": [name for name, scheduler in SCHEDULERS.items() if scheduler.available()],
                "free_bytes": usage.free,
            }
        )

    return [Route("/api/machine", machine)]


PAGE = pathlib.Path(__file__).parents[1] / "page"


def page_routes(_: BoardState) -> list[BaseRoute]:
    """Every path that is no other's."""
    return [Mount("/", StaticFiles(directory=PAGE, html=True))]
