"""What the handlers of one server share: its folders, its list of jobs, its planner."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import time
from typing import Any

from meshtune.board import follow, queue
from meshtune.board.job import PROGRESS, Job, read_jobs, read_json
from meshtune.board.workspace import Workspace
from meshtune.serve.guard import ApiError, Gate

SECONDS = 60.0  # of a request; a compilation has more
COMPILE_SECONDS = 1800.0
MOST_PROCESSES = 4
MAX_ANSWER = 2**24  # bytes


class Planner:
    """Asks processes of their own. Nothing here outlives a restart, or needs to."""

    def __init__(self, workspace: Workspace):
        self._workspace = workspace
        self._idle: list[asyncio.subprocess.Process] = []
        self._pending: dict[str, asyncio.Task[dict[str, Any]]] = {}

    async def ask(self, request: dict[str, Any], page: str) -> dict[str, Any]:
        """The answer of a process; a request of the same `page` that is still under way is given up.

        Raises: ApiError where it was superseded, took too long, or the process ended.
        """
        if (former := self._pending.pop(page, None)) is not None:
            former.cancel()
        if len(self._pending) >= MOST_PROCESSES:
            raise ApiError(429, "too many plans are under way; try again")
        task = asyncio.ensure_future(self._answer(request))
        self._pending[page] = task
        try:
            return await task
        except asyncio.CancelledError as error:
            raise ApiError(409, "a newer request took the place of this one") from error
        finally:
            if self._pending.get(page) is task:
                del self._pending[page]

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        process = await self._process()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            await process.stdin.drain()
            seconds = COMPILE_SECONDS if request.get("compile") else SECONDS
            line = await asyncio.wait_for(process.stdout.readline(), seconds)
        except TimeoutError as error:
            await end(process)
            raise ApiError(504, "planning took too long") from error
        except (asyncio.CancelledError, OSError):
            await end(process)
            raise
        if not line:
            await end(process)
            raise ApiError(500, "the planning process ended without an answer")
        if self._idle:
            await end(process)
        else:
            self._idle.append(process)
        return json.loads(line)

    async def close(self) -> None:
        """Ends the process that waits for the next request."""
        while self._idle:
            await end(self._idle.pop())

    async def _process(self) -> asyncio.subprocess.Process:
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "meshtune.board.planning",
            stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL,
            cwd=self._workspace.root, env={**os.environ, "JAX_PLATFORMS": "cpu"},
            start_new_session=True, limit=MAX_ANSWER,
        )  # fmt: skip


async def end(process: asyncio.subprocess.Process) -> None:
    """Kills a process with the compilers that it started."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.shield(process.wait())


FRESH_SECONDS = 0.4


class BoardState:
    """`workspace` and `gate`; `cookie` is the name of the session's cookie. Nothing here outlives the files."""

    def __init__(self, workspace: Workspace, gate: Gate, token: str | None, cookie: str):
        self.workspace, self.gate, self.token, self.cookie = workspace, gate, token, cookie
        self.planner = Planner(workspace)
        self._lock = threading.Lock()
        self._jobs: list[dict[str, Any]] = []
        self._read_at = float("-inf")
        self.streams = 0  # of events, under way

    def jobs(self) -> list[dict[str, Any]]:
        """All jobs as JSON, newest first; read from the files at most every FRESH_SECONDS for all readers together."""
        with self._lock:
            if time.monotonic() - self._read_at > FRESH_SECONDS:
                jobs = read_jobs(self.workspace.jobs)
                if any(job.state == "queued" for job in jobs):
                    queue.start_next(self.workspace)  # a runner that was killed has not
                    jobs = read_jobs(self.workspace.jobs)
                self._jobs = [self.describe(job) for job in reversed(jobs)]
                self._read_at = time.monotonic()
            return self._jobs

    def describe(self, job: Job) -> dict[str, Any]:
        """A job as JSON, with how far its run, or the stage that it is in, has come."""
        fields = job.to_json() | {"stage": read_json(job.folder / PROGRESS) or None}
        if job.output is None:
            return fields
        run = follow.run_json(job.output) if job.state != "queued" else {}
        last = follow.last_update(job.output) if run else {}
        progress = {"step": last.get("step"), "loss": last.get("loss"), "total": run.get("total")}
        shown = self.workspace.shown(job.output)
        return fields | {"output": shown, "progress": progress, "exists": job.output.is_dir()}
