"""Asks servers for JSON, in a bounded time."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from meshtune.errors import UserError
from meshtune.json_text import parse_json

TRIES = 3
PAUSE = 1.0  # seconds between the first two tries; then twice that
LARGEST_ANSWER = 256 << 20  # bytes


def ask_server(address: str, body: object, deadline: float, *, failure: str, fix: str) -> Any:
    """The JSON that a server answers to `body` by POST, or to GET where that is None.

    A server that cannot be reached, or answers 500, 408 or 429, is asked three times before `deadline`, a time of
    time.monotonic. Raises: UserError, which begins with `failure`, for one that gives no JSON; it ends with `fix` where
    waiting longer might help.
    """
    content = None if body is None else json.dumps(body).encode()
    problem, number = "it did not answer", 0
    for number in range(1, TRIES + 1):
        request = urllib.request.Request(address, content, {"Content-Type": "application/json"})
        try:
            answer = read_answer(request, deadline)
        except urllib.error.HTTPError as error:
            problem = f"it answered {error.code}: {error.read(300).decode('utf-8', 'replace')}"
            if error.code < 500 and error.code not in (408, 429):
                raise server_error(
                    address, failure, problem, "correct the address, or what the server expects"
                ) from error
        except (OSError, http.client.HTTPException) as error:
            problem = str(getattr(error, "reason", None) or error or type(error).__name__)
        else:
            return parse_json(answer, address)
        pause = PAUSE * 2 ** (number - 1)
        if time.monotonic() + pause >= deadline:
            break
        if number < TRIES:
            time.sleep(pause)
    raise server_error(address, failure, f"{problem} (tried {number} times)", fix)


def server_error(address: str, failure: str, problem: str, fix: str) -> UserError:
    """The error of a server at `address` that gives not what it is asked for."""
    return UserError(f"{failure}: {problem}", where=address, fix=fix)


def read_answer(
    request: urllib.request.Request, deadline: float, open_url: Callable[..., Any] = urllib.request.urlopen
) -> bytes:
    """Returns the answer if all of it comes before the deadline. Raises OSError and HTTPException otherwise."""
    parts, size = [], 0
    with open_url(request, timeout=max(0.01, deadline - time.monotonic())) as response:
        while part := response.read1(1 << 20):
            parts.append(part)
            size += len(part)
            if size > LARGEST_ANSWER:
                raise OSError(f"its answer has more than {LARGEST_ANSWER >> 20} MiB")
            if time.monotonic() > deadline:
                raise TimeoutError("its answer did not end in time")
    return b"".join(parts)
