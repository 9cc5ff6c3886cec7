"""The checks that every request passes before its route: token, Host and Origin, size and form of the body; and errors
as OpenAI's API has them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import ipaddress
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any
from urllib.parse import urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request, cookie_parser
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshtune.errors import UserError
from meshtune.generate.request import QueueFull

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """An error of a client. `param` is the field of the request, `code` a word that programs may read."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def as_api_error(problem: Exception) -> ApiError:
    """Any exception as what the client is told: nothing of the server's inside."""
    match problem:
        case ApiError():
            return problem
        case QueueFull():
            return ApiError(429, f"{problem.what}; {problem.fix}", code="queue_full")
        case UserError():
            message = problem.what + (f"; {problem.fix}" if problem.fix else "")
            return ApiError(400, message, param=problem.where)
        case _:
            return ApiError(500, f"the server failed ({type(problem).__name__}); its log says more")


DRAIN_SECONDS = 30.0  # for requests under way when the process is asked to end


@dataclasses.dataclass
class Gate:
    """Counts the requests under way, and is closed to new ones when the process is to end."""

    closed: bool = False
    under_way: int = 0
    _deadline: float = 0.0

    def close(self, seconds: float = DRAIN_SECONDS) -> None:
        """Lets no further request in; those under way have these seconds."""
        self.closed, self._deadline = True, time.monotonic() + seconds

    @property
    def drained(self) -> bool:
        """Whether it is closed and nothing is under way, or the time is over."""
        return self.closed and (self.under_way == 0 or time.monotonic() > self._deadline)


MOST_AT_ONCE = 256 * 2**20  # bytes of all bodies that are being read
DEPTH = 100  # levels of a value

_being_read = 0


async def json_body(request: Request, max_body: int) -> dict[str, Any]:
    """The body. Raises ApiError for one that is too long (bytes) or nested too deeply, that is not a JSON object in
    UTF-8, or that has a name twice."""
    global _being_read
    content = bytearray()
    try:
        async for part in request.stream():
            content += part
            _being_read += len(part)
            if len(content) > max_body:
                raise ApiError(413, f"the body is longer than the {max_body} bytes that are read")
            if _being_read > max(MOST_AT_ONCE, max_body):
                raise ApiError(429, "the server is reading as many bodies as it can; try again in a while")
        return await run_in_threadpool(_parse_body, content)
    finally:
        _being_read -= len(content)


def parse_json(text: str) -> Any:
    """A JSON value. Raises ValueError for a text that is none, is nested too deeply, or has a name twice."""
    try:
        value = json.loads(text, object_pairs_hook=_object)
        if text.count("[") + text.count("{") >= DEPTH:
            _check_depth(value)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError as problem:
        raise ValueError("there is half of a surrogate pair, which is no character") from problem
    except RecursionError as problem:
        raise ValueError("it is nested too deeply") from problem


def _parse_body(content: bytearray) -> dict[str, Any]:
    try:
        body = parse_json(content.decode("utf-8"))
    except ValueError as problem:
        raise _mistake(problem) from problem
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    return body


def _mistake(problem: ValueError) -> ApiError:
    if isinstance(problem, UnicodeDecodeError):
        return ApiError(400, f"the body is not UTF-8: {problem.reason} at byte {problem.start}")
    return ApiError(400, f"the body is not JSON that is read: {problem}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"'{twice[:100]}' is there twice")
    return value


def _check_depth(value: Any) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(DEPTH):
        if not level:
            return
        level = [
            inner
            for container in level
            for inner in (container.values() if isinstance(container, dict) else container)
            if isinstance(inner, dict | list)
        ]
    raise ValueError("it is nested too deeply")


LOG = logging.getLogger(__name__)
OPEN_PATHS = ("/health",)
PREFLIGHT = {"access-control-allow-methods": "GET, POST", "access-control-allow-headers": "*"}
PORTS = {"http": 80, "https": 443}
_AUTHORITY = re.compile(r"[A-Za-z0-9._~%-]+|[A-Za-z0-9._~%-]+:[0-9]{1,5}|\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?")


@dataclasses.dataclass
class Guard:
    """An ASGI application before another one.

    `token` is what clients must send as a bearer token (None: none). A request whose Host is not in `hosts` is refused
    (empty: any host), as a page on another site could otherwise reach a server on this machine; so is one whose Origin
    is not in `origins`, which also get the CORS headers that let a browser read the answer. A closed `gate` refuses
    every request. Where `content_types` are given, a request that changes something must have one of them: none that a
    form of another site could send. `open_path` says which paths need no token, and `cookie` names one that may hold
    `cookie_of(token)` in place of the header. Raises UserError for an origin that is none.
    """

    app: ASGIApp
    _: dataclasses.KW_ONLY
    max_body: int
    token: str | None = None
    hosts: Collection[str] = ()
    origins: Collection[str] = ()
    gate: Gate | None = None
    content_types: Collection[str] = ()
    open_path: Callable[[str], bool] = OPEN_PATHS.__contains__
    cookie: str | None = None

    def __post_init__(self):
        self._hosts = {_authority(host) for host in self.hosts}
        self._origins = {parse_site(origin) for origin in self.origins}
        self._gate = self.gate or Gate()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses a request, or passes it on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        app, started = self.app, False
        if "origin" in headers:
            app, send = self._for_site(headers["origin"], scope, send)

        async def send_and_note(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        self._gate.under_way += 1
        try:
            self._check(scope, headers)
            await app(scope, receive, send_and_note)
        except ClientDisconnect:  # amid its body: there is nobody to answer
            pass
        except Exception as problem:  # raised on, it would cut the connection before the client has read the answer
            if not isinstance(problem, ApiError):
                LOG.exception("%s %s failed", scope["method"], scope["path"])
            if not started:
                error = as_api_error(problem)
                await JSONResponse(error.body, error.status)(scope, receive, send)
        finally:
            self._gate.under_way -= 1

    def _for_site(self, origin: str, scope: Scope, send: Send) -> tuple[ASGIApp, Send]:
        """What answers a page of a site: of one that may call, with CORS headers, which it may ask for beforehand."""
        if _origin(origin) not in self._origins:
            return self.app, send

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update({"access-control-allow-origin": origin, "vary": "Origin"})
            await send(message)

        return JSONResponse({}, headers=PREFLIGHT) if scope["method"] == "OPTIONS" else self.app, send_with_headers

    def _check(self, scope: Scope, headers: dict[str, str]) -> None:
        if self._hosts or "origin" in headers:
            self._check_site(headers.get("host", ""), headers.get("origin"))
        if scope["method"] == "OPTIONS":
            return
        if self.token is not None and not self.open_path(scope["path"]) and not self._has_token(headers):
            raise ApiError(401, "the bearer token is missing or wrong", code="invalid_api_key")
        if self.content_types and scope["method"] not in ("GET", "HEAD"):
            self._check_content_type(headers.get("content-type", ""))
        if self._gate.closed:
            raise ApiError(503, "the server is about to end and takes no new requests", code="shutting_down")
        length = headers.get("content-length", "0")
        if not re.fullmatch("[0-9]{1,19}", length):
            raise ApiError(400, "the header content-length is not a number of bytes")
        if int(length) > self.max_body:
            raise ApiError(413, f"the body of {length} bytes is more than the {self.max_body} that are read")

    def _check_site(self, host_header: str, origin: str | None) -> None:
        host = _authority(host_header)
        if self._hosts and (host is None or (host[0], None) not in self._hosts):
            raise ApiError(403, f"the host '{host_header}' is not served here")
        if host is None and host_header:
            raise ApiError(400, "the header Host is not a name or address with a port")
        if origin is not None and not self._may_call(_origin(origin), host):
            raise ApiError(403, f"pages of {origin} may not call this server; it can be allowed by --cors-origin")

    def _may_call(self, site: tuple[str, str, int] | None, host: tuple[str, int | None] | None) -> bool:
        """Whether pages of a site may call: those of allowed sites, and those of this server."""
        if site in self._origins:
            return True
        scheme, *authority = site or ("", None)
        return host is not None and authority == [host[0], PORTS.get(scheme) if host[1] is None else host[1]]

    def _check_content_type(self, header: str) -> None:
        content_type = header.partition(";")[0].strip().lower()
        if content_type not in self.content_types:
            allowed = " or ".join(self.content_types)
            raise ApiError(415, f"the content type is '{content_type}', and must be {allowed}")

    def _has_token(self, headers: dict[str, str]) -> bool:
        assert self.token is not None
        bearer = re.sub("^Bearer +", "", headers.get("authorization", ""), flags=re.IGNORECASE)
        if hmac.compare_digest(bearer.encode(), self.token.encode()):
            return True
        if self.cookie is None:
            return False
        cookie = cookie_parser(headers.get("cookie", "")).get(self.cookie, "")
        return hmac.compare_digest(cookie.encode(), cookie_of(self.token).encode())


def cookie_of(token: str) -> str:
    """A cookie that a browser sends in place of a token: it proves to know the token, and does not tell it."""
    return hmac.new(token.encode(), b"meshtune session", "sha256").hexdigest()


def _authority(text: str) -> tuple[str, int | None] | None:
    """(name, port) of a Host header, in the one form that equal hosts have; None for a text that is none."""
    if not _AUTHORITY.fullmatch(text):
        return None
    parts = urlsplit(f"//{text}")
    try:
        name, port = (parts.hostname or "").removesuffix("."), parts.port
    except ValueError:
        return None
    with contextlib.suppress(ValueError):
        name = str(ipaddress.ip_address(name))
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
