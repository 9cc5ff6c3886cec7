"""The application of the board: its routes behind the same guard as the API server."""

from __future__ import annotations

from collections.abc import Collection

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshtune.board.answers import answer_malformed, answer_refusal, answer_unknown, answer_unwritable
from meshtune.board.routes import all_routes
from meshtune.board.routes.session import SESSION
from meshtune.board.state import BoardState
from meshtune.board.workspace import Workspace
from meshtune.errors import UserError
from meshtune.serve.guard import ApiError, Gate, Guard

MAX_UPLOAD = 2 * 2**30  # bytes
# Bodies come as JSON, files as bytes: a form of another site can send neither.
CONTENT_TYPES = ("application/json", "application/octet-stream")
HANDLERS = {
    **dict.fromkeys((ApiError, UserError), answer_refusal),
    **dict.fromkeys((RecursionError, OverflowError, UnicodeError), answer_malformed),
    HTTPException: answer_unknown,
    OSError: answer_unwritable,
}
HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' blob:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}


def create_app(
    workspace: Workspace,
    *,
    token: str | None = None,
    hosts: Collection[str] = (),
    gate: Gate | None = None,
    cookie: str = "meshtune",
) -> Starlette:
    """The application. `token`, `hosts` and `gate` are those of `Guard`; `cookie` is the name of the session's."""
    gate = gate or Gate()
    state = BoardState(workspace, gate, token, cookie)
    guard = Middleware(
        Guard,
        token=token,
        hosts=hosts,
        origins=(),
        max_body=MAX_UPLOAD,
        gate=gate,
        content_types=CONTENT_TYPES,
        open_path=_needs_no_token,
        cookie=cookie,
    )
    app = Starlette(
        routes=all_routes(state),
        middleware=[Middleware(_Headers), guard],
        exception_handlers=HANDLERS,
    )
    app.state.board = state
    return app


def _needs_no_token(path: str) -> bool:
    """The page itself holds no data, and has to be there to ask for the token."""
    return path == SESSION or not path.startswith(("/api/", "/v1/"))


class _Headers:
    """Adds HEADERS to every answer that does not set them itself; the page is asked for again each time (by ETag)."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name.lower() for name, _ in message.get("headers", [])}
                extra = {**HEADERS, "cache-control": "no-cache"}
                new = [(name.encode(), value.encode()) for name, value in extra.items() if name.encode() not in present]
                message["headers"] = [*message.get("headers", []), *new]
            await send(message)

        await self._app(scope, receive, send_with_headers)
