"""One stream of server-sent events for a page: the list of jobs, and the output of one of them.

The id of an event holds how far each file was read, so that a browser that comes back (Last-Event-ID) or a page that
was loaded again (`cursor`) continues exactly there, whatever was written meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from meshtune.board import follow, queue
from meshtune.board.answers import json_bytes
from meshtune.board.follow import CHUNK, START, TAIL, News, read_lines, read_text
from meshtune.board.job import Job
from meshtune.board.state import BoardState
from meshtune.errors import UserError
from meshtune.serve.guard import ApiError
from meshtune.train.report.metrics_log import METRICS, SAMPLES

POLL_SECONDS = 0.5
PING_SECONDS = 15.0
MOST_STREAMS = 100  # each reads files twice a second


def event_routes(state: BoardState) -> list[BaseRoute]:
    """GET /api/events?job=ID&cursor=..."""

    async def events(request: Request) -> Response:
        job_id = request.query_params.get("job")
        cursor = request.headers.get("last-event-id") or request.query_params.get("cursor", "")
        if job_id:
            await run_in_threadpool(queue.find, state.workspace, job_id)
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        if state.streams >= MOST_STREAMS:
            fix = "close pages of the board that nobody looks at"
            raise ApiError(503, f"{MOST_STREAMS} pages are open, and no more are kept up to date; {fix}")
        return _Stream(state, _stream(state, job_id, _positions(cursor)), headers=headers)

    return [Route("/api/events", events)]


class _Stream(StreamingResponse):
    """A stream that counts while it is open, however it ends."""

    media_type = "text/event-stream"

    def __init__(self, state: BoardState, events: AsyncGenerator[str], **options: Any):
        super().__init__(events, **options)
        self._state, self._events = state, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends events until the page is gone, or the server ends."""
        self._state.streams += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._state.streams -= 1
            await self._events.aclose()


def _positions(cursor: str) -> dict[str, str]:
    """The position in each file, of an id such as `metrics:12-340,samples:13-0,log:14-99`."""
    positions: dict[str, str] = {"metrics": START, "samples": START, "log": START}
    for part in cursor.split(","):
        name, _, position = part.partition(":")
        if name in positions:
            positions[name] = position
    return positions


async def _stream(state: BoardState, job_id: str | None, positions: dict[str, str]) -> AsyncGenerator[str]:
    jobs: list[dict[str, Any]] | None = None
    silent = 0.0
    yield "retry: 1000\n\n"
    while not state.gate.closed:
        texts: list[str] = []
        new = await run_in_threadpool(state.jobs)
        if new != jobs:
            jobs = new
            texts.append(_event("jobs", {"jobs": jobs}))
        has_more = False
        if job_id:
            try:
                news, positions = await run_in_threadpool(_news, state, job_id, positions)
            except UserError:  # removed while it is shown
                yield _event("gone", {"job": job_id})
                return
            if news:
                has_more = news.pop("more", False)
                texts.append(_event("run", news, ",".join(f"{name}:{at}" for name, at in positions.items())))
        if texts or silent >= PING_SECONDS:
            yield "".join(texts) or ": still here\n\n"
            silent = 0.0
        if not has_more:
            await asyncio.sleep(POLL_SECONDS)
            silent += POLL_SECONDS


def _news(state: BoardState, job_id: str, positions: dict[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Reads new content since `positions`, {} for nothing, and the new positions."""
    job = queue.find(state.workspace, job_id)
    news: dict[str, Any] = {}
    after = dict(positions)
    has_more = False
    for name, file in (("metrics", METRICS), ("samples", SAMPLES)):
        if job.output is None or not (job.output / file).exists():  # what was read of a file that is gone stays shown
            continue
        read = read_lines(job.output / file, positions[name])
        after[name] = read.cursor
        rows, broken = follow.rows_of(read)
        if rows or broken or read.reset:
            news[name] = {"rows": rows, "broken": broken, "reset": read.reset}
        has_more = has_more or len(read.content) > CHUNK // 2
    text = _log_news(job, positions["log"])
    after["log"] = text.cursor
    if text.content or text.reset:
        content = text.content.decode("utf-8", "replace")
        news["log"] = {"text": content, "reset": text.reset, "skipped": text.skipped}
    if news:
        news |= {"job": job_id, "more": has_more}
        if job.output is not None:
            news["checkpoints"] = follow.checkpoints(job.output)
    return news, after


def _log_news(job: Job, position: str) -> News:
    return read_text(job.log, position, limit=TAIL, behind=TAIL)


def _event(name: str, data: dict[str, Any], identity: str | None = None) -> str:
    head = f"id: {identity}\n" if identity is not None else ""
    return f"{head}event: {name}\ndata: {json_bytes(data).decode()}\n\n"
