"""What the board's API answers: JSON, and what is wrong as a list of problems."""

from __future__ import annotations

from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from meshtune.board.queue import NoSuchJob
from meshtune.config.problems import RecipeError
from meshtune.errors import UserError
from meshtune.serve.body import json_body
from meshtune.serve.errors import ApiError, as_api_error

MAX_BODY = 4 * 2**20  # bytes of a request in JSON


async def body_of(request: Request) -> dict[str, Any]:
    """The JSON object that a request brings; {} for an empty body. Raises: ApiError."""
    if request.headers.get("content-length") == "0":
        return {}
    return await json_body(request, MAX_BODY)


def problems_of(error: Exception) -> list[dict[str, str | None]]:
    """What is wrong, as {path, message, fix} for each field; `path` is that of the field, as `train.steps`."""
    if isinstance(error, RecipeError) and error.problems:
        return [{"path": path, "message": message, "fix": fix} for path, message, fix in error.problems]
    if isinstance(error, UserError):
        return [{"path": error.where, "message": error.what, "fix": error.fix}]
    return [{"path": None, "message": as_api_error(error).message, "fix": None}]


async def refused(_: Request, error: Exception) -> Response:
    """The answer to a request that cannot be done."""
    status = 404 if isinstance(error, NoSuchJob) else as_api_error(error).status
    return JSONResponse({"problems": problems_of(error)}, status)


async def unwritable(_: Request, error: Exception) -> Response:
    """The answer where the disk refused: it is full, or a file is not this user's."""
    assert isinstance(error, OSError)
    fix = "make room or make it writable, and try again"
    problem = {"path": str(error.filename or "") or None, "message": error.strerror or str(error), "fix": fix}
    return JSONResponse({"problems": [problem]}, 507)


async def unknown(request: Request, error: Exception) -> Response:
    """The answer to a request for what there is not."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path} is not part of the board"
    return await refused(request, ApiError(error.status_code, message))
