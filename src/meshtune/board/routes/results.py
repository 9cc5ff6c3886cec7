"""What evaluations, predictions and exports have written: tables, the report, and files to download."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import BaseRoute, Route

from meshtune.board import queue
from meshtune.board.answers import Answer
from meshtune.board.job import Job
from meshtune.board.measured import read_figures
from meshtune.board.state import BoardState
from meshtune.errors import UserError
from meshtune.evaluate.folder import HTML

# The report is one file with styles and pictures inside; it runs nothing and asks nobody.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'self'; sandbox"
MOST_FILES = 500


def result_routes(state: BoardState) -> list[BaseRoute]:
    """GET /api/results/JOB, its /report, and /files/PATH, which lie in the job's output."""
    workspace = state.workspace

    def show(job: Job, _: Request) -> Response:
        output = _output(job)
        fields: dict[str, Any] = {
            "report": (output / HTML).is_file(),
            **read_figures(output),
            "files": _files(output),
            "folder": workspace.shown(output),
        }
        return Answer(fields)

    def report(job: Job, _: Request) -> Response:
        file = _confined(_output(job), HTML)
        return HTMLResponse(file.read_bytes(), headers={"content-security-policy": POLICY})

    def download(job: Job, request: Request) -> Response:
        file = _confined(_output(job), request.path_params["path"])
        headers = {"content-security-policy": "default-src 'none'; sandbox"}
        return FileResponse(file, media_type="application/octet-stream", filename=file.name, headers=headers)

    def of_job(answer: Callable[[Job, Request], Response]) -> Callable[[Request], Any]:
        async def handle(request: Request) -> Response:
            job = await run_in_threadpool(queue.find, workspace, request.path_params["job"])
            return await run_in_threadpool(answer, job, request)

        return handle

    def _output(job: Job) -> pathlib.Path:
        if job.output is None:
            raise UserError(f"job {job.id} writes no files", fix="look at its log")
        return workspace.to_read(str(job.output), "output")

    return [
        Route("/api/results/{job}", of_job(show)),
        Route("/api/results/{job}/report", of_job(report)),
        Route("/api/results/{job}/files/{path:path}", of_job(download)),
    ]


def _files(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Files below a folder that are no links, with their sizes in bytes."""
    entries: list[dict[str, Any]] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = pathlib.Path(parent) / name
            if not name.startswith(".") and path.is_file() and not path.is_symlink():
                entries.append({"path": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size})
                if len(entries) >= MOST_FILES:
                    return entries
    return entries


def _confined(folder: pathlib.Path, name: str) -> pathlib.Path:
    """A file below `folder`, also after symbolic links. Raises: UserError."""
    try:
        path = pathlib.Path(os.path.realpath(folder / name))
        if path.is_relative_to(folder) and path.is_file():
            return path
    except ValueError:  # a null byte
        pass
    raise UserError(f"there is no file {name!r} in {folder}", where="path", fix="choose one of the list")
