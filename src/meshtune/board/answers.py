"""Answers of the board's API: JSON, with errors as a list of problems."""

from __future__ import annotations

import errno
import json
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from meshtune.board.follow import plain
from meshtune.board.queue import NoSuchJob
from meshtune.config.problems import RecipeError
from meshtune.errors import UserError
from meshtune.serve.guard import ApiError, as_api_error, json_body

BAD_PATH = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ENOENT, errno.ELOOP, errno.EINVAL, errno.EILSEQ)
MAX_BODY = 4 * 2**20  # bytes of a request in JSON


def json_bytes(content: Any) -> bytes:
    """JSON as `Answer` describes it."""
    options: dict[str, Any] = {"separators": (",", ":")}
    try:
        return json.dumps(content, ensure_ascii=False, allow_nan=False, **options).encode()
    except (ValueError, TypeError):  # rare: what is as usual is not looked through twice
        return json.dumps(plain(content), default=str, skipkeys=True, **options).encode()


class Answer(JSONResponse):
    """JSON that every browser reads, whatever files and recipes hold: NaN becomes null, halves of surrogate pairs are
    escaped, and what JSON has no form for is text."""

    def render(self, content: Any) -> bytes:
        """The bytes of an answer."""
        return json_bytes(content)


async def body_of(request: Request) -> dict[str, Any]:
    """The JSON object that a request brings; {} for an empty body. Raises: ApiError."""
    if request.headers.get("content-length") == "0":
        return {}
    return await json_body(request, MAX_BODY)


def problems_of(error: Exception) -> list[dict[str, str | None]]:
    """The problems as {path, message, fix} for each field; `path` is that of the field, as `train.steps`."""
    if isinstance(error, RecipeError) and error.problems:
        return [{"path": path, "message": message, "fix": fix} for path, message, fix in error.problems]
    if isinstance(error, UserError):
        return [{"path": error.where, "message": error.what, "fix": error.fix}]
    return [{"path": None, "message": as_api_error(error).message, "fix": None}]


async def answer_refusal(_: Request, error: Exception) -> Response:
    """The answer to a request that cannot be done."""
    status = 404 if isinstance(error, NoSuchJob) else as_api_error(error).status
    return Answer({"problems": problems_of(error)}, status)


async def answer_malformed(_: Request, error: Exception) -> Response:
    """The answer to input that Python cannot hold: nested deeper than it recurses, a number beyond its range, text that
    is no Unicode."""
    kinds = {RecursionError: "it is nested too deeply", OverflowError: "a number in it is too large"}
    reason = next(
        (reason for kind, reason in kinds.items() if isinstance(error, kind)), "its text is not valid Unicode"
    )
    return await answer_refusal(_, ApiError(400, f"the request cannot be read: {reason}"))


async def answer_unwritable(_: Request, error: Exception) -> Response:
    """The answer where the disk refused: it is full, or a file is not this user's; 400 where the path is the cause."""
    assert isinstance(error, OSError)
    if error.errno in BAD_PATH:
        problem = {"path": None, "message": f"the path cannot be used: {error.strerror}", "fix": "give another one"}
        return Answer({"problems": [problem]}, 400)
    fix = "make room or make it writable, and try again"
    problem = {"path": str(error.filename or "") or None, "message": error.strerror or str(error), "fix": fix}
    return Answer({"problems": [problem]}, 507)


async def answer_unknown(request: Request, error: Exception) -> Response:
    """The answer to a request for what there is not."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path} is not part of the board"
    return await answer_refusal(request, ApiError(error.status_code, message))
