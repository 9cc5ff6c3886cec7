"""The body of a request."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from meshtune.serve.errors import ApiError

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
        _check_depth(value)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as problem:
        raise ValueError("there is half of a surrogate pair, which is no character") from problem
    except RecursionError as problem:
        raise ValueError("it is nested too deeply") from problem
    return value


def _parse_body(content: bytearray) -> dict[str, Any]:
    try:
        body = parse_json(content.decode("utf-8"))
    except UnicodeDecodeError as problem:
        raise ApiError(400, f"the body is not UTF-8: {problem.reason} at byte {problem.start}") from problem
    except ValueError as problem:
        raise ApiError(400, f"the body is not JSON that is read: {problem}") from problem
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    return body


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
