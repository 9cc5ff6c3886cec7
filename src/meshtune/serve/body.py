"""The body of a request."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request

from meshtune.serve.errors import ApiError


async def json_body(request: Request, max_body: int) -> dict[str, Any]:
    """The body. Raises ApiError for one that is too long (bytes), and one that is not a JSON object in UTF-8."""
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > max_body:
            raise ApiError(413, f"the body is longer than the {max_body} bytes that are read")
    try:
        body = json.loads(content.decode("utf-8"))
        if b"\\u" in content:
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeDecodeError as problem:
        raise ApiError(400, f"the body is not UTF-8: {problem.reason} at byte {problem.start}") from problem
    except UnicodeEncodeError as problem:
        raise ApiError(400, "the body has half of a surrogate pair, which is no character") from problem
    except RecursionError as problem:
        raise ApiError(400, "the body is nested too deeply") from problem
    except ValueError as problem:
        raise ApiError(400, f"the body is not JSON: {problem}") from problem
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    return body
