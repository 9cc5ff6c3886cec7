"""Routes of conversations with a model that a job serves."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from meshtune.board import queue
from meshtune.board.answers import Answer
from meshtune.board.catalogue import catalogue
from meshtune.board.follow import log_end
from meshtune.board.job import Job, read_jobs
from meshtune.board.kinds import TOKEN_FILE
from meshtune.board.state import BoardState
from meshtune.data.chat_templates import template_names
from meshtune.errors import UserError
from meshtune.serve.guard import ApiError, json_body

HEAD = 1 << 20  # bytes of a log in which the address stands
_ADDRESS = re.compile(rb"^address  (http://127\.0\.0\.1:(\d{1,5}))/v1\r?$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Address:
    """Where a model listens, as http://127.0.0.1:PORT, and what it asks for."""

    url: str
    token: str


def address_of(job: Job) -> Address | None:
    """Where the model of a running job listens; None before it answers, and after it has ended."""
    if job.request.kind != "serve" or job.state != "running":
        return None
    try:
        with job.log.open("rb") as file:
            match = _ADDRESS.search(file.read(HEAD))
        token = (job.folder / TOKEN_FILE).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return Address(match[1].decode(), token) if match and token else None


MAX_BODY = 16 * 2**20  # bytes
ASKING = httpx.Timeout(5.0)
ANSWERING = httpx.Timeout(None, connect=5.0)
PATHS = ("chat/completions", "completions", "score/evaluation")


def talk_routes(state: BoardState) -> list[BaseRoute]:
    """GET /api/catalogue; GET /api/talk; and below /api/talk/JOB/v1/ the API of a model, for any client of OpenAI's."""
    workspace = state.workspace

    async def list_catalogue(_: Request) -> Response:
        return Answer({"entries": await run_in_threadpool(catalogue, workspace)})

    async def list_served(_: Request) -> Response:
        jobs = await run_in_threadpool(read_jobs, workspace.jobs)
        served = [job for job in jobs if job.request.kind == "serve"]
        return Answer(
            {"models": await asyncio.gather(*map(_describe_model, served)), "chat_templates": template_names()}
        )

    async def find(request: Request) -> Address:
        job = await run_in_threadpool(queue.find, workspace, request.path_params["job"])
        if (address := await run_in_threadpool(address_of, job)) is None:
            raise ApiError(503, f"the model of job {job.id} does not answer: it is {job.state}", code="not_loaded")
        return address

    async def models(request: Request) -> Response:
        try:
            address = await find(request)
            return Answer({"object": "list", "data": await _models(address)})
        except (ApiError, UserError) as error:
            return _refusal(error)

    async def ask(request: Request) -> Response:
        try:
            if request.path_params["path"] not in PATHS:
                raise ApiError(404, f"there is no {request.path_params['path']} here: {', '.join(PATHS)}")
            address = await find(request)
            body = await json_body(request, MAX_BODY)
            return await _passed_on(f"{address.url}/v1/{request.path_params['path']}", address, body)
        except (ApiError, UserError) as error:
            return _refusal(error)

    return [
        Route("/api/catalogue", list_catalogue),
        Route("/api/talk", list_served),
        Route("/api/talk/{job}/v1/models", models),
        Route("/api/talk/{job}/v1/{path:path}", ask, methods=["POST"]),
    ]


async def _describe_model(job: Job) -> dict[str, Any]:
    """A served model as JSON; `ids` are those of its API once it answers."""
    fields = {
        "job": job.id,
        "name": job.to_json()["name"],
        "model": job.request.arguments[1],
        "state": job.state,
        "ids": [],
        "reason": log_end(job.log) if job.state in ("failed", "lost") else None,
    }
    if (address := address_of(job)) is None:
        return fields
    try:
        return fields | {"ids": [model["id"] for model in await _models(address)], "address": f"{address.url}/v1"}
    except ApiError:
        return fields


async def _models(address: Address) -> list[dict[str, Any]]:
    try:
        async with httpx.AsyncClient(timeout=ASKING, trust_env=False) as client:
            answer = await client.get(f"{address.url}/v1/models", headers=_headers(address))
            return answer.raise_for_status().json()["data"]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise ApiError(502, f"the model does not answer ({type(error).__name__})", code="no_answer") from error


async def _passed_on(url: str, address: Address, body: dict[str, Any]) -> Response:
    """The model's answer as it comes. Where the reader goes away, the request to the model ends too."""
    client = httpx.AsyncClient(timeout=ANSWERING, trust_env=False)
    content = json.dumps(body).encode()
    try:
        sending = client.build_request("POST", url, content=content, headers=_headers(address))
        answer = await client.send(sending, stream=True)
    except httpx.HTTPError as error:
        await client.aclose()
        raise ApiError(502, f"the model does not answer ({type(error).__name__})", code="no_answer") from error

    async def pieces() -> AsyncIterator[bytes]:
        try:
            async for piece in answer.aiter_raw():
                yield piece
        except httpx.HTTPError as error:
            failure = ApiError(502, f"the model has ended ({type(error).__name__})", code="no_answer")
            yield f"\n\ndata: {json.dumps(failure.body)}\n\n".encode()
        finally:
            await answer.aclose()
            await client.aclose()

    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(
        pieces(), answer.status_code, headers, media_type=answer.headers.get("content-type", "application/json")
    )


def _headers(address: Address) -> dict[str, str]:
    return {"authorization": f"Bearer {address.token}", "content-type": "application/json"}


def _refusal(error: ApiError | UserError) -> Response:
    """In the shape of OpenAI's API, whose clients read this."""
    if isinstance(error, UserError):
        status = 404 if isinstance(error, queue.NoSuchJob) else 400
        error = ApiError(status, error.what, param=error.where)
    return Answer(error.body, error.status)
