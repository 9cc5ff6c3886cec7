"""`python -m meshtune.board.runner JOB`: runs the command of one job, and writes how it ended.

It leads a separate session and outlives the server. The command writes to the job's log itself: nobody has
to read it. When the command has ended, what it left running is ended too, and the next job of the queue is started.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

from meshtune.board.devices import environment
from meshtune.board.job import (
    EXIT,
    JOB_VARIABLE,
    LOG,
    PROCESS,
    PROGRESS,
    SECRET,
    STOP,
    Job,
    end_processes_of,
    identify,
    read_job,
    replace_json,
)
from meshtune.runs.progress import VARIABLE

RESERVED = 2048  # bytes set aside at the start, so that the end can be written on a disk that is full by then
ROOM_SECONDS = 60.0  # to wait for room


def main(folder: pathlib.Path) -> int:
    """Runs the job; returns 0, or 1 if it is not to be started: it has been, or was removed."""
    secrets = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(SECRET)}
    job = read_job(folder)
    if job is None or not _claim(folder):
        return 1
    # No-ops and not SIG_IGN, which the command would inherit.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    started = time.monotonic()
    code = _run(job, {name.removeprefix(SECRET): value for name, value in secrets.items()})
    seconds = round(time.monotonic() - started, 3)
    ended = end_processes_of(job.folder)
    _write_exit(folder, {"code": code, "seconds": seconds, "ended_processes": len(ended)})
    from meshtune.board.queue import start_next
    from meshtune.board.workspace import Workspace

    start_next(Workspace(pathlib.Path(job.request.root)))
    return 0


def _claim(folder: pathlib.Path) -> bool:
    """Whether this is the process that runs the job: the first that writes its process.json."""
    runner = identify(os.getpid())
    assert runner is not None
    draft = folder / f".{PROCESS}.{os.getpid()}.partial"
    draft.write_text(json.dumps({"runner": runner.to_json()}), encoding="utf-8")
    try:
        os.link(draft, folder / PROCESS)  # whole from the first moment, and refused where there is one
    except FileExistsError:
        return False
    finally:
        draft.unlink()
    (folder / f".{EXIT}.reserved").write_bytes(b" " * RESERVED)
    return True


def _run(job: Job, secrets: Mapping[str, str]) -> int | None:
    """Runs the command; returns its exit code, negative for a signal, or None where it was stopped before it began."""
    if (job.folder / STOP).exists():
        return None
    if (problem := _paths_problem(job)) is not None:
        with (job.folder / LOG).open("ab") as log:
            log.write(f"error: {problem}\n".encode())
        return 2
    command = [sys.executable, "-m", "meshtune", *job.request.arguments]
    env = environment(job.request.devices) | {JOB_VARIABLE: str(job.folder), "PYTHONUNBUFFERED": "1"}
    env |= {VARIABLE: str(job.folder / PROGRESS), **secrets}
    with (job.folder / LOG).open("ab") as log:
        try:
            process = subprocess.Popen(
                command, cwd=job.request.root, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        except OSError as error:
            log.write(f"error: the command cannot be started: {error}\n".encode())
            return 1
    runner, child = identify(os.getpid()), identify(process.pid)
    with contextlib.suppress(OSError):
        processes = {"runner": runner, "child": child}
        replace_json(job.folder / PROCESS, {name: known.to_json() for name, known in processes.items() if known})
    if child is not None and (job.folder / STOP).exists():  # asked for before anybody could know the child
        child.send(signal.SIGTERM)
    return process.wait()


def _paths_problem(job: Job) -> str | None:
    """Why the paths of a job may not be opened: they led into the workspace when it was asked for, and no longer do."""
    from meshtune.board.workspace import Workspace, check_job
    from meshtune.errors import UserError

    request = job.request
    try:
        if request.readable is not None:
            readable = tuple(map(pathlib.Path, request.readable))
            check_job(Workspace(pathlib.Path(request.root), readable, request.runs_code), job)
    except UserError as error:
        return str(error)
    return None


def _write_exit(folder: pathlib.Path, fields: dict[str, object]) -> None:
    reserved = folder / f".{EXIT}.reserved"
    content = json.dumps(fields).encode().ljust(RESERVED)
    deadline = time.monotonic() + ROOM_SECONDS
    while folder.is_dir():
        try:
            with reserved.open("r+b" if reserved.exists() else "wb") as file:
                file.write(content)
            os.replace(reserved, folder / EXIT)
            return
        except OSError:
            if time.monotonic() > deadline:
                return
            time.sleep(1)


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
