"""What the handlers of one server share: where its files are, and a list of jobs that all its streams read."""

from __future__ import annotations

import threading
import time
from typing import Any

from meshtune.board import queue, records
from meshtune.board.job import PROGRESS, Job, read_jobs, read_json
from meshtune.board.planner import Planner
from meshtune.board.workspace import Workspace
from meshtune.serve.gate import Gate

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
        run = records.run_json(job.output) if job.state != "queued" else {}
        last = records.last_update(job.output) if run else {}
        progress = {"step": last.get("step"), "loss": last.get("loss"), "total": run.get("total")}
        shown = self.workspace.shown(job.output)
        return fields | {"output": shown, "progress": progress, "exists": job.output.is_dir()}
