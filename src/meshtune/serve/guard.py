"""The checks before every request: the token, the Host and Origin headers, and the size of the body."""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import re
from collections.abc import Callable, Collection
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect, cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshtune.errors import UserError
from meshtune.serve.errors import ApiError, as_api_error
from meshtune.serve.gate import Gate

LOG = logging.getLogger(__name__)
OPEN_PATHS = ("/health",)
PORTS = {"http": 80, "https": 443}
_AUTHORITY = re.compile(r"[A-Za-z0-9._~%-]+|[A-Za-z0-9._~%-]+:[0-9]{1,5}|\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?")


class Guard:
    """An ASGI application before another one.

    `token` is what clients must send as a bearer token (None: none). A request whose Host is not in `hosts` is refused
    (empty: any host), as a page on another site could otherwise reach a server on this machine; so is one whose Origin
    is not in `origins`, which also get the CORS headers that let a browser read the answer. A closed `gate` refuses
    every request. Where `content_types` are given, a request that changes something must have one of them: none that a
    form of another site could send. `open_path` says which paths need no token, and `cookie` names one that may hold
    `cookie_of(token)` in place of the header. Raises UserError for an origin that is none.
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
        self._app, self._token = app, token
        self._hosts = {_authority(host) for host in hosts}
        self._origins = {parse_site(origin) for origin in origins}
        self._max_body, self._gate = max_body, gate or Gate()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses a request, or passes it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        origin = headers.get("origin")
        allowed: dict[str, str] = {}
        if origin and _origin(origin) in self._origins:
            allowed = {"access-control-allow-origin": origin, "vary": "Origin"}
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
                message["headers"] = [*message.get("headers", []), *_encode_headers(allowed)]
            await send(message)

        self._gate.under_way += 1
        try:
            await self._app(scope, receive, send_with_headers)
        except ClientDisconnect:  # amid its body: there is nobody to answer
            pass
        except Exception as problem:  # raised on, it would cut the connection before the client has read the answer
            LOG.exception("%s %s failed", scope["method"], scope["path"])
            if not started:
                error = as_api_error(problem)
                await _respond(send, error.status, error.body, allowed)
        finally:
            self._gate.under_way -= 1

    def _check(self, scope: Scope, headers: dict[str, str]) -> None:
        host, origin = _authority(headers.get("host", "")), headers.get("origin")
        if self._hosts and (host is None or (host[0], None) not in self._hosts):
            raise ApiError(403, f"the host '{headers.get('host', '')}' is not served here")
        if host is None and headers.get("host"):
            raise ApiError(400, "the header Host is not a name or address with a port")
        if origin is not None and (site := _origin(origin)) not in self._origins:
            scheme, *authority = site or ("", None)
            if host is None or authority != [host[0], PORTS.get(scheme) if host[1] is None else host[1]]:
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
        if not re.fullmatch("[0-9]{1,19}", length):
            raise ApiError(400, "the header content-length is not a number of bytes")
        if int(length) > self._max_body:
            raise ApiError(413, f"the body of {length} bytes is more than the {self._max_body} that are read")

    def _has_token(self, headers: dict[str, str]) -> bool:
        assert self._token is not None
        bearer = re.sub("^Bearer +", "", headers.get("authorization", ""), flags=re.IGNORECASE)
        if hmac.compare_digest(bearer.encode(), self._token.encode()):
            return True
        if self._cookie is None:
            return False
        cookie = cookie_parser(headers.get("cookie", "")).get(self._cookie, "")
        return hmac.compare_digest(cookie.encode(), cookie_of(self._token).encode())


def cookie_of(token: str) -> str:
    """A cookie that a browser sends in place of a token: it proves to know the token, and does not tell it."""
    return hmac.new(token.encode(), b"meshtune session", "sha256").hexdigest()


def _authority(text: str) -> tuple[str, int | None] | None:
    """(name, port) of a Host header, in the one form that equal hosts have; None for a text that is none."""
    if not _AUTHORITY.fullmatch(text):
        return None
    parts = urlsplit(f"//{text}")
    try:
        name, port = parts.hostname or "", parts.port
    except ValueError:
        return None
    try:
        name = str(ipaddress.ip_address(name))
    except ValueError:
        name = name.removesuffix(".")
    return (name, port) if name else None


def _origin(text: str) -> tuple[str, str, int] | None:
    """(scheme, name, port) of an Origin header; None for a text that is no site, such as `null`."""
    scheme, separator, remainder = text.partition("://")
    authority = _authority(remainder)
    if not separator or scheme.lower() not in PORTS or authority is None:
        return None
    name, port = authority
    return scheme.lower(), name, PORTS[scheme.lower()] if port is None else port


def parse_site(text: str) -> tuple[str, str, int]:
    """(scheme, name, port) of a site whose pages may call. Raises UserError for anything else."""
    origin = _origin(text.removesuffix("/"))
    if origin is None:
        raise UserError(
            f"'{text}' is not the address of a site", where="--cors-origin", fix="write https://chat.example.com"
        )
    return origin


def _encode_headers(headers: dict[str, Any]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), str(value).encode()) for name, value in headers.items()]


async def _respond(send: Send, status: int, body: dict[str, Any], headers: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    all_headers = {"content-type": "application/json", "content-length": len(content), **headers}
    await send({"type": "http.response.start", "status": status, "headers": _encode_headers(all_headers)})
    await send({"type": "http.response.body", "body": content})
