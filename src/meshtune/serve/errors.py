"""Errors in the shape of the OpenAI API, whose clients choose the exception by the status."""

from __future__ import annotations

from typing import Any

from meshtune.errors import UserError
from meshtune.generate.scheduler import QueueFull

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
