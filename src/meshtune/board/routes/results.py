"""Routes of runs, models and adapters, and of what an evaluation measured."""

from __future__ import annotations

import functools
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import BaseRoute, Route

from meshtune.board import queue
from meshtune.board.answers import Answer, body_of
from meshtune.board.catalogue import catalogue
from meshtune.board.follow import is_number, plain, read_lines
from meshtune.board.job import Job, read_json
from meshtune.board.state import BoardState
from meshtune.board.workspace import check_references
from meshtune.errors import UserError
from meshtune.evaluate.folder import HTML, PREDICTIONS, TASKS, TOTALS

MOST_ROWS = 50
# An evaluation's folders of one model each, what was there before tuning first; a prediction has no such folder.
MODELS = ("base", "before", "model", "tuned", "after")


def read_figures(output: pathlib.Path) -> dict[str, Any]:
    """`models` as [{"name", "figures": {METRIC: number}}], and `rows` as [{"prompt", "reference", "answers"}] with an
    answer of each model, None where it has none yet. Empty where nothing was measured."""
    folders = {name: output / name for name in MODELS if (output / name).is_dir()} or {"": output}
    figures = {name: _figures(folder) for name, folder in folders.items()}
    answers = {name: list(_predictions(folder / PREDICTIONS)) for name, folder in folders.items()}
    named = [name for name in folders if figures[name] or answers[name]]
    longest = max((answers[name] for name in named), key=len, default=[])
    rows = [
        {
            "prompt": row.get("prompt"),
            "reference": row.get("reference"),
            "answers": [answers[name][number].get("answer") if number < len(answers[name]) else None for name in named],
        }
        for number, row in enumerate(longest)
    ]
    return {"models": [{"name": name, "figures": figures[name]} for name in named], "rows": rows}


def _figures(folder: pathlib.Path) -> dict[str, float]:
    """The numbers of a model's records by metric, and of its tasks by task and metric."""
    totals = plain(read_json(folder / TOTALS))
    figures = {name: value for name, value in totals.items() if is_number(value)}
    tasks = read_json(folder / TASKS).get("tasks")
    for task in tasks if isinstance(tasks, list) else []:
        if not isinstance(task, dict) or not isinstance(metrics := plain(task.get("metrics")), dict):
            continue
        figures |= {
            f"{task.get('name')} {name.removesuffix(',none')}": v for name, v in metrics.items() if is_number(v)
        }
    return figures


def _predictions(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """The first MOST_ROWS answers; broken lines are left out."""
    for line in read_lines(path).content.splitlines()[:MOST_ROWS]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            yield plain(row)


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
        file = file_below(_output(job), HTML)
        return HTMLResponse(file.read_bytes(), headers={"content-security-policy": POLICY})

    def download(job: Job, request: Request) -> Response:
        file = file_below(_output(job), request.path_params["path"])
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


def file_below(folder: pathlib.Path, name: str) -> pathlib.Path:
    """A file below `folder`, also after symbolic links. Raises: UserError."""
    try:
        path = pathlib.Path(os.path.realpath(folder / name))
        if path.is_relative_to(folder) and path.is_file():
            return path
    except ValueError:  # a null byte
        pass
    raise UserError(f"there is no file {name!r} in {folder}", where="path", fix="choose one of the list")


LIST = pathlib.Path(__file__).parents[1] / "models.json"  # made by benchmarks/plans/families.py


def model_routes(state: BoardState) -> list[BaseRoute]:
    """/api/models and what is below it."""
    workspace = state.workspace

    async def list_models(_: Request) -> Response:
        local = [entry for entry in await run_in_threadpool(catalogue, workspace) if entry["kind"] != "adapter"]
        return Answer({"hub": listed(), "local": local})

    async def machine(request: Request) -> Response:
        page = request.query_params.get("page", "")[:100]
        answer = await state.planner.ask({"work": "machine"}, f"machine {page}")
        return Answer(answer, 400 if answer.get("problems") else 200)

    async def memory(request: Request) -> Response:
        body = await body_of(request)
        path = body.get("path")
        if not isinstance(path, str) or not path.strip():
            raise UserError("the model is missing", where="path", fix="give a folder, a GGUF file or a hub id")
        source = await run_in_threadpool(lambda: check_references(workspace, workspace.source(path, "path"), "path"))
        page = str(body.get("page") or "")[:100]
        answer = await state.planner.ask({"work": "methods", "path": source}, f"memory {page}")
        return Answer(answer, 400 if answer.get("problems") else 200)

    return [
        Route("/api/models", list_models),
        Route("/api/models/machine", machine),
        Route("/api/models/memory", memory, methods=["POST"]),
    ]


@functools.cache
def listed() -> list[dict[str, Any]]:
    """{name, id, family, bytes by method} of models that are often tuned."""
    return json.loads(LIST.read_text(encoding="utf-8"))
