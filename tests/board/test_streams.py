"""Many pages at once, and clients that send half of a request: the board answers others, and keeps nothing of them."""

from __future__ import annotations

import contextlib
import json
import pathlib
import socket
import time
import urllib.error
import urllib.request

import psutil
import pytest
from boards import wait
from browsers import Board, running

from meshtune.board.routes.events import MOST_STREAMS

STREAMS = 300


def ask(board: Board, path: str) -> int:
    """The status of an answer, which comes within five seconds."""
    try:
        with urllib.request.urlopen(board.address + path, timeout=5) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def send_text(board: Board, text: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", board.port), 10)
    connection.sendall(text.replace("\n", "\r\n").encode())
    return connection


def test_300_streams_of_events_are_bounded_and_leave_nothing(tmp_path: pathlib.Path):
    with running(tmp_path / "root") as board, contextlib.ExitStack() as stack:
        assert board.process is not None
        process = psutil.Process(board.process.pid)
        assert ask(board, "/api/jobs") == 200
        files = process.num_fds()
        request = f"GET /api/events HTTP/1.1\nhost: 127.0.0.1:{board.port}\n\n"
        streams = [stack.enter_context(contextlib.closing(send_text(board, request))) for _ in range(STREAMS)]
        statuses = [stream.recv(12).decode().split()[1] for stream in streams]
        assert statuses.count("200") == MOST_STREAMS
        assert statuses.count("503") == STREAMS - MOST_STREAMS
        refused = streams[statuses.index("503")]
        assert "pages" in json.loads(refused.recv(4096).decode().partition("\r\n\r\n")[2])["problems"][0]["message"]
        for path in ("/api/jobs", "/", "/api/machine"):
            assert ask(board, path) == 200
        assert process.num_threads() < 80
        for stream in streams:
            stream.close()
        wait(lambda: process.num_fds() <= files + 5, 20)
        with contextlib.closing(send_text(board, request)) as stream:
            assert stream.recv(12).decode().split()[1] == "200"
        before = sum(process.cpu_times()[:2])
        time.sleep(2)
        assert sum(process.cpu_times()[:2]) - before < 0.5, "streams go on that nobody reads"


@pytest.mark.slow
def test_half_sent_requests_end(tmp_path: pathlib.Path):
    """Headers and bodies that never end, as many as there are; others are answered all the while."""
    limits = pytest.importorskip("meshtune.serve.server").Limits()
    with running(tmp_path / "root") as board, contextlib.ExitStack() as stack:
        head = f"host: 127.0.0.1:{board.port}\n"
        halves = (
            f"GET /api/jobs HTTP/1.1\n{head}x: ",
            f"POST /api/check HTTP/1.1\n{head}content-type: application/json\ncontent-length: 100\n\n{{",
            f"POST /api/data/upload?name=a.txt HTTP/1.1\n{head}content-type: application/octet-stream\n"
            "content-length: 100\n\nx",
        )
        connections = [stack.enter_context(contextlib.closing(send_text(board, halves[n % 3]))) for n in range(600)]
        started = time.monotonic()
        while time.monotonic() - started < limits.body_seconds + 5:
            assert ask(board, "/api/jobs") == 200
            time.sleep(2)
        for connection in connections:
            connection.settimeout(5)
            answer = connection.recv(4096)
            assert not answer or b" 408 " in answer
        assert not list((tmp_path / "root/data").glob("*"))
