"""What stands before every request: the token, the Host and Origin headers, and the size of the body."""

from __future__ import annotations

import hmac
import json
import logging
from collections.abc import Callable, Collection
from typing import Any

from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshtune.serve.errors import ApiError, as_api_error
from meshtune.serve.gate import Gate

LOG = logging.getLogger(__name__)
OPEN_PATHS = ("/health",)


class Guard:
    """An ASGI application before another one.

    `token` is what clients must send as a bearer token (None: none). A request whose Host is not in `hosts` is refused
    (empty: any host), as a page on another site could otherwise reach a server on this machine; so is one whose Origin
    is not in `origins`, which also get the CORS headers that let a browser read the answer. A closed `gate` refuses
    every request. Where `content_types` are given, a request that changes something must have one of them: none that a
    form of another site could send. `open_path` says which paths need no token, and `cookie` names one that may hold
    `cookie_of(token)` in place of the header.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str | None,
        hosts: Collection[str],
        origins: Collection[str],
        max_body: int,
        gate: Gate | None = None,
        content_types: Collection[str] = (),
        open_path: Callable[[str], bool] = OPEN_PATHS.__contains__,
        cookie: str | None = None,
    ):
        self._content_types, self._open_path, self._cookie = content_types, open_path, cookie
        self._app, self._token, self._hosts, self._origins = app, token, hosts, origins
        self._max_body, self._gate = max_body, gate or Gate()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses a request, or passes it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        origin = headers.get("origin")
        allowed = {"access-control-allow-origin": origin, "vary": "Origin"} if origin in self._origins else {}
        try:
            self._check(scope, headers)
        except ApiError as refused:
            await _respond(send, refused.status, refused.body, allowed)
            return
        if scope["method"] == "OPTIONS" and allowed:
            methods = {"access-control-allow-methods": "GET, POST", "access-control-allow-headers": "*"}
            await _respond(send, 200, {}, allowed | methods)
            return

        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            started = True
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *_encoded(allowed)]
            await send(message)

        self._gate.under_way += 1
        try:
            await self._app(scope, receive, send_with_headers)
        except Exception as problem:  # raised on, it would cut the connection before the client has read the answer
            LOG.exception("%s %s failed", scope["method"], scope["path"])
            if not started:
                error = as_api_error(problem)
                await _respond(send, error.status, error.body, allowed)
        finally:
            self._gate.under_way -= 1

    def _check(self, scope: Scope, headers: dict[str, str]) -> None:
        host = headers.get("host", "").rsplit(":", 1)[0] if not headers.get("host", "").endswith("]") else "[::1]"
        if self._hosts and host not in self._hosts:
            raise ApiError(403, f"the host '{host}' is not served here")
        origin = headers.get("origin")
        if origin is not None and origin not in self._origins and origin.split("//")[-1] != headers.get("host"):
            raise ApiError(403, f"pages of {origin} may not call this server; it can be allowed by --cors-origin")
        if scope["method"] == "OPTIONS":
            return
        if self._token is not None and not self._open_path(scope["path"]) and not self._has_token(headers):
            raise ApiError(401, "the bearer token is missing or wrong", code="invalid_api_key")
        if self._content_types and scope["method"] not in ("GET", "HEAD"):
            content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
            if content_type not in self._content_types:
                allowed = " or ".join(self._content_types)
                raise ApiError(415, f"the content type is '{content_type}', and must be {allowed}")
        if self._gate.closed:
            raise ApiError(503, "the server is about to end and takes no new requests", code="shutting_down")
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._max_body:
            raise ApiError(413, f"the body of {length} bytes is more than the {self._max_body} that are read")

    def _has_token(self, headers: dict[str, str]) -> bool:
        assert self._token is not None
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if hmac.compare_digest(bearer.encode(), self._token.encode()):
            return True
        if self._cookie is None:
            return False
        cookie = cookie_parser(headers.get("cookie", "")).get(self._cookie, "")
        return hmac.compare_digest(cookie.encode(), cookie_of(self._token).encode())


def cookie_of(token: str) -> str:
    """What a browser holds in place of a token: it proves to know it, and does not tell it."""
    return hmac.new(token.encode(), b"meshtune session", "sha256").hexdigest()


def _encoded(headers: dict[str, Any]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), str(value).encode()) for name, value in headers.items()]


async def _respond(send: Send, status: int, body: dict[str, Any], headers: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    whole = {"content-type": "application/json", "content-length": len(content), **headers}
    await send({"type": "http.response.start", "status": status, "headers": _encoded(whole)})
    await send({"type": "http.response.body", "body": content})
