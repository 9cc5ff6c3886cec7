"""Ends every process of a job soon after one of them fails, with a message that names it and a telling exit code.

Exit codes: 75 (EX_TEMPFAIL) another process was lost or did not come in time, and the same command resumes the run; 2 a
mistake of the user; 1 a defect, on this process or on the one that the message names.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
import time
from collections.abc import Callable

from meshtune.errors import UserError
from meshtune.mesh.client import Client
from meshtune.mesh.protocol import EXIT_PROCESS_LOST, JobEnd

MAIN_THREAD_GRACE = 1.0  # seconds in which the main thread may end by itself, with its own message
REASON_TIMEOUT = 3.0  # seconds to wait for the reason after a collective operation failed
GLOO = re.compile(r"\bGloo\b|cpu:gloo")  # in errors of JAX's collective operations between CPUs
GLOO_SECONDS = (
    30  # that its processes may come apart; JAX sets no other limit (https://github.com/jax-ml/jax/issues/40831)
)

_exiting = threading.Lock()


def exit_on_job_end(client: Client, wait_for_others: Callable[[], None]) -> None:
    """From now on this process exits when the job ends, even while its main thread is blocked.

    For `wait_for_others` see `leave_on_error`.
    """
    client.on_end = lambda job_end: _exit_on_end(client, job_end, wait_for_others)


def leave_on_error(client: Client, error: BaseException, wait_for_others: Callable[[], None]) -> None:
    """Handles `error`, which ends the main thread: reports it to the other processes, or to the user their reason.

    Returns if the error arose on this process, so that it propagates as usual; interpreter shutdown is then cut short,
    because JAX would wait there for processes that have gone. Does not return if another process caused the end.
    `wait_for_others` makes process 0 wait for the others to leave: JAX aborts them as soon as process 0 is gone.
    """
    if not isinstance(error, UserError | KeyboardInterrupt | SystemExit):
        # A process that dies breaks the pending collective operation, often before its loss is known here.
        client.ended.wait(REASON_TIMEOUT)
    if client.job_end is None and GLOO.search(str(error)):
        client.report_failure(_not_connected(client, error))
        client.job_end = client.job_end or _not_connected(client, error)
    if client.job_end is not None:
        _report_and_exit(client, client.job_end, wait_for_others)
    client.report_failure(job_end_of(client, error))
    wait_for_others()
    atexit.register(_exit, _exit_code(error))


def _not_connected(client: Client, error: BaseException) -> JobEnd:
    """An operation between processes that all live has failed, because they began it further apart than Gloo waits."""
    info = client.info
    return JobEnd(
        "lost",
        f"process {info.process_index} of {info.process_count} on {client.host} waited {GLOO_SECONDS} s for the others "
        f"in an operation that all take part in: {str(error).strip().splitlines()[0]}",
        info.process_index,
        client.host,
        fix="the same command with resume=true continues from the last checkpoint; where it happens again, start fewer "
        "processes on each machine, or leave it other work: JAX's Gloo, which joins CPUs, has no longer limit",
        exit_code=EXIT_PROCESS_LOST,
    )


def job_end_of(client: Client, error: BaseException, cause: str = "failed") -> JobEnd:
    """Converts an `error` of this process to the report that the other processes get."""
    info = client.info
    if isinstance(error, UserError):
        message, where, fix = error.what, error.where, error.fix
    else:
        text = str(error).strip().splitlines()
        message, where, fix = f"{type(error).__name__}{': ' + text[0] if text else ''}", None, "look at its log"
    if cause == "failed":
        message = f"process {info.process_index} of {info.process_count} on {client.host} failed: {message}"
    return JobEnd(cause, message, info.process_index, client.host, where, fix, _exit_code(error))


def _exit_code(error: BaseException) -> int:
    if isinstance(error, UserError):
        return 2
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _exit_on_end(client: Client, job_end: JobEnd, wait_for_others: Callable[[], None]) -> None:
    # JAX aborts this process within a tenth of a second after process 0 is gone, with a message that names no process.
    deadline = time.monotonic() + (0.0 if job_end.cause == "lost" else MAIN_THREAD_GRACE)
    while time.monotonic() < deadline:
        if client.leaving:
            return
        time.sleep(0.02)
    _report_and_exit(client, job_end, wait_for_others)


def _report_and_exit(client: Client, job_end: JobEnd, wait_for_others: Callable[[], None]) -> None:
    if not _exiting.acquire(blocking=False):
        time.sleep(60)  # the other thread is already exiting
    show_cursor = "\x1b[?25h\n" if sys.stderr.isatty() else "\n"  # a progress bar may have hidden the cursor
    lines = [f"error: {job_end.message}", *([f"where: {job_end.where}"] if job_end.where else [])]
    lines += [f"  fix: {job_end.fix}"] if job_end.fix else []
    os.write(2, (show_cursor + "\n".join(lines) + "\n").encode())
    client.close()
    wait_for_others()
    _exit(job_end.exit_code or EXIT_PROCESS_LOST)


def _exit(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
