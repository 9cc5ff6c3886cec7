"""Signing in: a token becomes a cookie, so that links, streams and pictures need no header."""

from __future__ import annotations

import hmac

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from meshtune.board.answers import Answer, body_of
from meshtune.board.state import BoardState
from meshtune.serve.errors import ApiError
from meshtune.serve.guard import cookie_of

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
