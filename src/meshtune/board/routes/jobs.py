"""Jobs: their list, their output, and the measurements of their runs."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Route

from meshtune.board import follow, queue
from meshtune.board.answers import Answer, body_of
from meshtune.board.devices import checked_choice
from meshtune.board.follow import START, log_end, read_text
from meshtune.board.job import RECIPE, Job, JobRequest
from meshtune.board.kinds import KINDS, scheduler_of
from meshtune.board.kinds import train_command as command_of_recipe
from meshtune.board.state import BoardState
from meshtune.board.workspace import checked_recipe
from meshtune.errors import UserError
from meshtune.runs.output import branch
from meshtune.runs.rollouts import newest_rollout, prompt_text
from meshtune.terminal import command
from meshtune.train.report.metrics_log import METRICS, SAMPLES
from meshtune.train.report.page import report_html

MOST_COMPLETIONS = 100  # that a page shows
# The report is one file with its styles inside, and runs nothing.
REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox"


def job_routes(state: BoardState) -> list[BaseRoute]:
    """POST /api/jobs starts one, /api/check reports problems before, /api/jobs/attach shows a run that was started
    without the board; GET /api/jobs/ID and paths below it."""
    workspace = state.workspace

    def prepared(body: dict[str, Any]) -> tuple[JobRequest, Mapping[str, str]]:
        kind = body.get("kind", "train")
        if not isinstance(kind, str) or kind not in KINDS:
            raise UserError(
                f"{str(kind)[:100]!r} is no kind of job", where="kind", fix=f"give one of {', '.join(KINDS)}"
            )
        devices = checked_choice(body.get("devices"))
        scheduler = scheduler_of(body)
        if kind != "train" and (scheduler or devices.get("processes", 1) > 1):
            where = scheduler or "devices.processes"
            raise UserError(f"a job of the kind {kind} is one process of this machine", where=where, fix="leave it out")
        ready = KINDS[kind](workspace, body)
        if ready.secrets:  # which are not there later, as no file holds them
            devices = {**devices, "beside": True}
        if not ready.computes:
            devices = {"none": True}
        root = str(workspace.root)
        return JobRequest(kind, ready.name, ready.arguments, root, ready.output, devices, scheduler), ready.secrets

    async def check(request: Request) -> Response:
        job_request, _ = await run_in_threadpool(prepared, await body_of(request))
        return Answer({"problems": [], "command": command(*_show_arguments(job_request.arguments))})

    async def create(request: Request) -> Response:
        body = await body_of(request)
        job_request, secrets = await run_in_threadpool(prepared, body)
        recipe = body.get("recipe") if isinstance(body.get("recipe"), str) else None
        job = await run_in_threadpool(queue.add, workspace, job_request, recipe, secrets)
        return Answer(state.describe(job), 201)

    async def attach(request: Request) -> Response:
        output = workspace.to_read((await body_of(request)).get("output"), "output")
        return Answer(state.describe(await run_in_threadpool(queue.attach, workspace, output)), 201)

    async def list_jobs(_: Request) -> Response:
        return Answer({"jobs": await run_in_threadpool(state.jobs)})

    def show(job: Job, _: Request) -> Response:
        output = job.output
        fields = state.describe(job) | {
            "command": command(*job.request.arguments),
            "reason": log_end(job.log) if job.state in ("failed", "lost") else None,
            "report": output is not None and follow.is_run(output),
            "run": {} if output is None else follow.run_json(output),
            "checkpoints": [] if output is None else follow.checkpoints(output),
        }
        return Answer(fields)

    def recipe(job: Job, _: Request) -> Response:
        return Answer({"recipe": _recipe_of(job)})

    def log(job: Job, request: Request) -> Response:
        after = request.query_params.get("after", "0")
        try:
            inode = os.stat(job.log).st_ino
        except OSError:
            inode = 0
        news = read_text(job.log, f"{inode}-{after}" if after.isdigit() else START)
        end = int(news.cursor.partition("-")[2])
        return Answer({"text": news.content.decode("utf-8", "replace"), "next": end})

    def report(job: Job, _: Request) -> Response:
        if job.output is None or not follow.is_run(job.output):
            raise UserError(f"job {job.id} has no run", fix="wait for its first update")
        with follow.reading_run(job.output):
            return HTMLResponse(report_html(job.output), headers={"content-security-policy": REPORT_POLICY})

    def branch_run(job: Job, body: dict[str, Any]) -> Job:
        step, overrides = body.get("step"), body.get("overrides", [])
        if type(step) is not int or not isinstance(overrides, list) or job.output is None:
            raise UserError("give the update of a checkpoint, and overrides as a list", where="step", fix="as 100")
        output = workspace.to_write(body.get("output"), "output")
        text = _recipe_of(job)
        earlier = [argument for argument in job.request.arguments if re.match(r"[\w.]+=", argument)]
        replaced = ("output=", "resume=", "overwrite=", "accept_changes=")
        changes = [change for change in [*earlier, *map(str, overrides)] if not change.startswith(replaced)]
        changes += [f"output={output}", "overwrite=false", "accept_changes=true", "resume=true"]
        checked_recipe(workspace, text, changes)
        devices = checked_choice(body.get("devices"))
        arguments = command_of_recipe(workspace, body, changes)
        root, scheduler = str(workspace.root), scheduler_of(body)
        branch(job.output, step, output)
        try:
            job_request = JobRequest("train", output.name, arguments, root, str(output), devices, scheduler)
            return queue.add(workspace, job_request, text)
        except (UserError, OSError):
            shutil.rmtree(output, ignore_errors=True)
            raise

    async def start_branch(request: Request) -> Response:
        body = await body_of(request)
        job = await run_in_threadpool(queue.find, workspace, request.path_params["job"])
        return Answer(state.describe(await run_in_threadpool(branch_run, job, body)), 201)

    def rows(name: str) -> Callable[[Job, Request], Response]:
        def answer(job: Job, request: Request) -> Response:
            if job.output is None:
                return Answer({"rows": [], "broken": 0, "cursor": START, "reset": False})
            return Answer(follow.all_rows(job.output, name, request.query_params.get("after", START)))

        return answer

    def rollouts(job: Job, _: Request) -> Response:
        rows = [] if job.output is None else newest_rollout(job.output)
        shown = [follow.plain({**row, "prompt": prompt_text(row["prompt"])}) for row in rows[:MOST_COMPLETIONS]]
        return Answer({"rows": shown, "count": len(rows)})

    def of_job(answer: Callable[[Job, Request], Response]) -> Callable[[Request], Any]:
        async def handle(request: Request) -> Response:
            job = await run_in_threadpool(queue.find, workspace, request.path_params["job"])
            return await run_in_threadpool(answer, job, request)

        return handle

    async def stop(request: Request) -> Response:
        now = bool((await body_of(request)).get("now"))
        return Answer(state.describe(await _on_job(request, queue.stop, now=now)))

    async def resume(request: Request) -> Response:
        return Answer(state.describe(await _on_job(request, queue.resume)))

    async def remove(request: Request) -> Response:
        await _on_job(request, queue.remove)
        return Answer({})

    async def _on_job(request: Request, change: Callable[..., Any], **options: Any) -> Any:
        return await run_in_threadpool(change, workspace, request.path_params["job"], **options)

    return [
        Route("/api/check", check, methods=["POST"]),
        Route("/api/jobs", create, methods=["POST"]),
        Route("/api/jobs", list_jobs),
        Route("/api/jobs/attach", attach, methods=["POST"]),
        Route("/api/jobs/{job}", of_job(show)),
        Route("/api/jobs/{job}/recipe", of_job(recipe)),
        Route("/api/jobs/{job}/report", of_job(report)),
        Route("/api/jobs/{job}/branch", start_branch, methods=["POST"]),
        Route("/api/jobs/{job}/log", of_job(log)),
        Route("/api/jobs/{job}/metrics", of_job(rows(METRICS))),
        Route("/api/jobs/{job}/samples", of_job(rows(SAMPLES))),
        Route("/api/jobs/{job}/rollouts", of_job(rollouts)),
        Route("/api/jobs/{job}/stop", stop, methods=["POST"]),
        Route("/api/jobs/{job}/resume", resume, methods=["POST"]),
        Route("/api/jobs/{job}/remove", remove, methods=["POST"]),
    ]


def _show_arguments(arguments: tuple[str, ...]) -> list[str]:
    """The arguments of a command that has no folder yet, as a person would give them."""
    return [argument.replace("{job}/", "") for argument in arguments]


def _recipe_of(job: Job) -> str:
    path = job.folder / RECIPE
    if not path.is_file():
        raise UserError(f"job {job.id} has no recipe", fix="start one from a recipe")
    return path.read_text(encoding="utf-8")
