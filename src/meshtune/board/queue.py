"""The queue: jobs are added, started when their devices are free, stopped, resumed and removed, under one lock.

Every function may be called by several servers and runners at once, and again after any of them was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping

from meshtune.board.devices import CPU, devices_of
from meshtune.board.follow import is_run
from meshtune.board.job import (
    ACTIVE,
    ATTEMPTS,
    EXIT,
    JOB,
    JOB_ID,
    LOG,
    PROCESS,
    RECIPE,
    SCHEDULERS,
    SECRET,
    STOP,
    Job,
    JobRequest,
    end_processes_of,
    read_job,
    read_jobs,
    replace_json,
)
from meshtune.board.workspace import Workspace, check_job
from meshtune.errors import UserError
from meshtune.runs.output import RUN

RESUMABLE = ("train", "data")
START_SECONDS = 20.0  # that a runner has to claim its job
LOCK = "queue.lock"


class NoSuchJob(UserError):
    """A job that is not, or no longer, there."""


def find(workspace: Workspace, job_id: str) -> Job:
    """The job of an id. Raises: NoSuchJob."""
    job = read_job(workspace.jobs / job_id) if JOB_ID.fullmatch(job_id) else None
    if job is None:
        raise NoSuchJob(f"there is no job {job_id!r}", fix="look at the list of jobs")
    return job


def add(
    workspace: Workspace, request: JobRequest, recipe: str | None = None, secrets: Mapping[str, str] | None = None
) -> Job:
    """Adds a job to the end of the queue, and starts it if its devices are free.

    Arguments of the request may hold `{job}`, for which the job's folder is put in. A job with `secrets`, variables of
    its environment that no file holds, starts at once. Raises: UserError if another job that has not ended writes to
    the same output.
    """
    with _lock(workspace):
        jobs = read_jobs(workspace.jobs)
        if (writer := _writer_to(request.output, jobs)) is not None:
            raise UserError(
                f"job {writer.id} writes to this output and has not ended",
                where="output",
                fix="give another output, or wait for that job",
            )
        folder = _write(workspace, jobs, request, recipe)
        if secrets:
            _start(find(workspace, folder.name), secrets)
    if request.scheduler:
        try:
            _submit(find(workspace, folder.name))
        except (UserError, OSError, subprocess.SubprocessError):
            shutil.rmtree(folder, ignore_errors=True)
            raise
    start_next(workspace)
    return find(workspace, folder.name)


def attach(workspace: Workspace, output: pathlib.Path) -> Job:
    """A job for a run that was started without the board, which is then shown, resumed and compared like others; the
    job that already has this output, if there is one. Raises: UserError for a folder that is no run's."""
    if not is_run(output):
        raise UserError(
            f"there is no run in {workspace.shown(output)}: it has no {RUN}",
            where="output",
            fix="give the output of a run, once it has begun",
        )
    with _lock(workspace):
        jobs = read_jobs(workspace.jobs)
        known = next((job for job in reversed(jobs) if job.request.kind == "train" and job.output == output), None)
        if known is not None:
            return known
        resolved = output / RECIPE
        recipe = resolved.read_text(encoding="utf-8") if resolved.is_file() else None
        arguments = ("train", str(resolved))
        request = JobRequest("train", output.name, arguments, str(workspace.root), str(output), is_attached=True)
        folder = _write(workspace, jobs, request, recipe)
    return find(workspace, folder.name)


def start_next(workspace: Workspace) -> None:
    """Starts queued jobs whose devices nobody uses, in order; one that waits keeps its devices from later ones."""
    with _lock(workspace):
        jobs = read_jobs(workspace.jobs)
        jobs = [job for job in jobs if not (job.request.scheduler or job.request.is_attached)]
        busy = [_reserved_devices(job) for job in jobs if job.state in ACTIVE]
        for job in jobs:
            if job.state != "queued":
                continue
            needed = devices_of(job.request.devices)
            if job.request.devices.get("beside") or not any(needed & reserved for reserved in busy):
                _start(job)
            busy.append(_reserved_devices(job))


def stop(workspace: Workspace, job_id: str, *, now: bool = False) -> Job:
    """Asks a job to save and end; asked again, it changes nothing. With `now`, all its processes are killed.

    The signal is sent once, since a run takes a second one as the wish to end without saving.
    """
    with _lock(workspace):
        job = find(workspace, job_id)
        if job.request.is_attached:
            problem = f"job {job.id} was started without the board"
            raise UserError(problem, fix="end it where it was started; Ctrl-C or SIGTERM saves it")
        if job.request.scheduler:
            if job.state in ("queued", *ACTIVE) and (_mark(job.folder / STOP) or now):
                try:
                    SCHEDULERS[job.request.scheduler].cancel(job.record, now=now)
                except UserError:
                    (job.folder / STOP).unlink(missing_ok=True)
                    raise
        elif job.state == "queued":
            replace_json(job.folder / EXIT, {"code": None, "seconds": 0})
        elif job.state in ACTIVE:
            first = _mark(job.folder / STOP)
            if now:
                if job.child is not None:
                    job.child.send(signal.SIGKILL)
                end_processes_of(job.folder, but=None if job.runner is None else job.runner.pid)
            elif first and job.child is not None:
                job.child.send(signal.SIGTERM)
    return find(workspace, job_id)


def resume(workspace: Workspace, job_id: str) -> Job:
    """Puts a job that has ended back into the queue, to go on from its newest checkpoint, or its last answer.

    Raises: UserError.
    """
    with _lock(workspace):
        job = find(workspace, job_id)
        if job.state in ("queued", *ACTIVE):
            return job
        if job.request.kind not in RESUMABLE:
            raise UserError(f"a job of the kind {job.request.kind} does not go on", fix="start it again")
        if (writer := _writer_to(job.request.output, read_jobs(workspace.jobs))) is not None:
            raise UserError(
                f"job {writer.id} writes to its output and has not ended", where="output", fix="wait for it"
            )
        check_job(workspace, job)
        attempts = job.folder / ATTEMPTS
        attempts.mkdir(exist_ok=True)
        again = ("resume=true",) if job.request.scheduler else ("--resume",)
        arguments = [argument for argument in job.request.arguments if argument not in (*again, "--overwrite")]
        fields = job.request.to_json() | {
            "arguments": [*arguments, *again],
            "is_attached": False,
            **_rights(workspace),
        }
        replace_json(job.folder / JOB, fields)
        aside = attempts / str(job.attempt)
        aside.mkdir(exist_ok=True)
        records = [scheduler.RECORD for scheduler in SCHEDULERS.values()]
        for name in (STOP, EXIT, *records, PROCESS):  # the last makes it queued
            if (job.folder / name).exists():
                os.replace(job.folder / name, aside / name)
    if job.request.scheduler:
        _submit(find(workspace, job_id))
    start_next(workspace)
    return find(workspace, job_id)


def remove(workspace: Workspace, job_id: str) -> None:
    """Removes a job that does not run; what it wrote to its output stays. Raises: UserError while it runs."""
    with _lock(workspace):
        job = find(workspace, job_id)
        if job.state in ACTIVE and not job.request.is_attached:
            raise UserError(f"job {job.id} runs", fix="stop it first")
        aside = workspace.jobs / f".{uuid.uuid4().hex}.removed"
        os.rename(job.folder, aside)
    shutil.rmtree(aside, ignore_errors=True)


def _write(workspace: Workspace, jobs: list[Job], request: JobRequest, recipe: str | None) -> pathlib.Path:
    """Writes the folder of a new job, whole or not at all; the number after those of `jobs` begins its name."""
    number = max((int(job.id.partition("-")[0]) for job in jobs), default=0) + 1
    slug = re.sub(r"[^a-z0-9]+", "-", request.name.lower()).strip("-")[:40].strip("-") or request.kind
    folder = workspace.jobs / f"{number:05d}-{slug}"
    draft = workspace.jobs / f".{uuid.uuid4().hex}.partial"
    arguments = [argument.replace("{job}", str(folder)) for argument in request.arguments]
    try:
        draft.mkdir()
        if recipe is not None:
            (draft / RECIPE).write_text(recipe, encoding="utf-8")
        (draft / LOG).touch()
        replace_json(draft / JOB, request.to_json() | {"arguments": arguments, **_rights(workspace)})
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    os.rename(draft, folder)
    return folder


def _rights(workspace: Workspace) -> dict[str, object]:
    """What a job may do, for its JobRequest."""
    return {"readable": [str(folder) for folder in workspace.readable], "runs_code": workspace.runs_code}


def _submit(job: Job) -> None:
    scheduler = SCHEDULERS[job.request.scheduler or ""]
    record = scheduler.submit(job.folder, job.request.root, list(job.request.arguments))
    replace_json(job.folder / scheduler.RECORD, record)


def _reserved_devices(job: Job) -> frozenset[str]:
    """The devices that a job keeps from later ones. A model that is talked to on a CPU keeps nothing but memory."""
    return devices_of(job.request.devices) - (frozenset({CPU}) if job.request.kind == "serve" else frozenset())


def _start(job: Job, secrets: Mapping[str, str] | None = None) -> None:
    """Starts the runner of a job and waits until it has claimed it."""
    env = {**os.environ, **{SECRET + name: value for name, value in (secrets or {}).items()}}
    with (job.folder / LOG).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "meshtune.board.runner", str(job.folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=env,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_SECONDS
    while not (job.folder / PROCESS).exists():
        if process.poll() is not None or time.monotonic() > deadline:
            replace_json(job.folder / EXIT, {"code": process.poll() or 1, "seconds": 0})
            return
        time.sleep(0.01)


def _writer_to(output: str | None, jobs: list[Job]) -> Job | None:
    """The job that has not ended and writes to `output`."""
    active = [job for job in jobs if job.state in ("queued", *ACTIVE)]
    return next((job for job in active if output is not None and job.request.output == output), None)


def _mark(path: pathlib.Path) -> bool:
    """Creates an empty file; returns whether it was not there."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # no room for it: the signal is sent nevertheless
        return True
    return True


@contextlib.contextmanager
def _lock(workspace: Workspace) -> Iterator[None]:
    with (workspace.folder / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
