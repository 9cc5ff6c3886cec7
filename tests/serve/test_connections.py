"""Misuse of a server's sockets: half requests, slow ones, many, headers of other sites."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from meshtune.errors import UserError
from meshtune.serve.guard import Gate, Guard
from meshtune.serve.server import Limits, Server

LIMITS = Limits(connections=20, header_seconds=0.5, body_seconds=1.0, body_rate=1000, read_seconds=1.0)
HALF = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx: "
REQUEST = b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"


async def echo(request: Request) -> Response:
    return PlainTextResponse(str(len(await request.body())))


async def endless(request: Request) -> Response:
    return PlainTextResponse("x" * 50_000_000)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A server of Meshtune's over an application that has nothing to compute."""
    app = Starlette(routes=[Route("/", echo, methods=["GET", "POST"]), Route("/endless", endless)])
    guard = Guard(app, token=None, hosts={"127.0.0.1", "localhost", "[::1]"}, origins=(), max_body=10**6)
    listener = socket.create_server(("127.0.0.1", 0), backlog=100)
    server = Server(uvicorn.Config(guard, log_level="error", lifespan="off"), Gate(), limits=LIMITS)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join()


def connect(port: int, content: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), 10)
    connection.sendall(content)
    return connection


def everything(connection: socket.socket) -> bytes:
    """Reads until the server closes."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def body_of(answer: bytes) -> dict[str, str]:
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


def test_half_a_header_and_nothing_at_all_are_closed(port):
    connections = [connect(port, HALF), connect(port)]
    assert [everything(connection) for connection in connections] == [b"", b""]


def test_headers_that_trickle_are_closed(port):
    connection, begin = connect(port, HALF), time.monotonic()
    with contextlib.suppress(OSError):
        while time.monotonic() - begin < 8:
            connection.sendall(b"x")
            time.sleep(0.1)
    assert time.monotonic() - begin < 6


def test_a_body_that_does_not_come_is_answered_and_one_that_comes_is_read(port):
    head = b"POST / HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 4000\r\n\r\n"
    answer = everything(connect(port, head + b"x" * 9))
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert "not complete after" in body_of(answer)["message"]
    connection = connect(port, head.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
    for _ in range(8):  # as slow as is allowed
        time.sleep(0.25)
        connection.sendall(b"x" * 500)
    assert everything(connection).endswith(b"4000")


def test_a_client_that_does_not_read_its_answer_is_closed(port):
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    connection.sendall(REQUEST.replace(b"/ ", b"/endless ", 1))
    time.sleep(2.5)
    assert len(everything(connection)) < 50_000_000


def test_half_requests_without_number_keep_nobody_out(port):
    """The oldest of them makes room."""
    connections = [connect(port, HALF) for _ in range(3 * LIMITS.connections)]
    answer = connect(port, REQUEST).recv(1000)
    assert answer.startswith(b"HTTP/1.1 200 ")
    for connection in connections:
        connection.close()


@pytest.mark.parametrize(
    "content",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: ten\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: " + b"9" * 5000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: -1\r\n\r\n",
        "GET / HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: ²\r\n\r\n".encode(),
        b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nhost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n" + b"x: y\r\n" * 5000,
        b"POST / HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST / HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: gzip\r\n\r\n",
    ],
    ids=lambda content: str(content[:70]),
)
def test_what_is_not_http_is_an_error_of_the_client(port, content):
    answer = everything(connect(port, content))
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 413 "))
    assert body_of(answer)["message"]


async def status(host: str | None, origin: str | None, origins: set[str], port: int = 8000) -> int:
    """How the guard answers a request with these headers."""
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        sent.append(message)

    guard = Guard(app, token=None, hosts={"127.0.0.1", "localhost", "[::1]"}, origins=origins, max_body=1)
    headers = [
        (name, value.encode("latin-1")) for name, value in ((b"host", host), (b"origin", origin)) if value is not None
    ]
    await guard({"type": "http", "method": "GET", "path": "/", "headers": headers}, None, send)  # pyright: ignore
    return sent[0]["status"]


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.0.0.1:8000", "localhost", "LocalHost:9", "localhost.", "localhost.:80", "[::1]", "[::1]:8000",
     "[0:0:0:0:0:0:0:1]:5"],
)  # fmt: skip
def test_hosts_of_this_machine(host):
    assert asyncio.run(status(host, None, set())) == 200
    assert asyncio.run(status(host, f"http://{host}", set())) == 200


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8000", "evil.example:localhost",
     "user@localhost", "localhost:x", "localhost:99999", "[::2]", "[::1", "::1", "evil.example]", "[evil.example]",
     "x[::1]", "[::1]x", "localhost/", "localhost#", "localhost?x", "localhost..", " localhost", "localhost\\evil",
     "127.1", "localhost:8000:8000", "loc\talhost", "evil.example:80]"],
)  # fmt: skip
def test_hosts_of_others(host):
    assert asyncio.run(status(host, None, set())) in (400, 403)


@pytest.mark.parametrize(
    ("origin", "host", "expected"),
    [
        ("http://localhost:8000", "localhost:8000", 200),
        ("HTTP://LOCALHOST:8000", "localhost:8000", 200),
        ("http://localhost", "localhost:80", 200),
        ("https://localhost", "localhost", 200),
        ("http://[::1]:8000", "[0::1]:8000", 200),
        ("https://chat.example", "localhost:8000", 200),
        ("https://chat.example:443", "localhost:8000", 200),
        ("https://CHAT.example.", "localhost:8000", 200),
        ("http://chat.example", "localhost:8000", 403),
        ("https://chat.example:8443", "localhost:8000", 403),
        ("https://chat.example.evil.example", "localhost:8000", 403),
        ("https://chat.example@evil.example", "localhost:8000", 403),
        ("https://evil.example//chat.example", "localhost:8000", 403),
        ("http://localhost:8001", "localhost:8000", 403),
        ("http://localhost", "localhost:8000", 403),
        ("http://127.0.0.1:8000", "localhost:8000", 403),
        ("http://evil.example//localhost:8000", "localhost:8000", 403),
        ("evil://localhost:8000", "localhost:8000", 403),
        ("file://localhost:8000", "localhost:8000", 403),
        ("//localhost:8000", "localhost:8000", 403),
        ("localhost:8000", "localhost:8000", 403),
        ("http://user@localhost:8000", "localhost:8000", 403),
        ("http://localhost:8000/", "localhost:8000", 403),
        ("null", "localhost:8000", 403),
        ("", "localhost:8000", 403),
    ],
)
def test_origins(origin, host, expected):
    assert asyncio.run(status(host, origin, {"https://chat.example"})) == expected


@pytest.mark.parametrize(
    "origin", ["*", "null", "chat.example", "https://chat.example/page", "https://a@b", "ftp://chat"]
)
def test_an_origin_to_allow_is_a_site(origin):
    with pytest.raises(UserError, match="not the address of a site") as refused:
        asyncio.run(status("localhost", None, {origin}))
    assert asyncio.run(status("localhost", None, {(refused.value.fix or "").removeprefix("write ")})) == 200
