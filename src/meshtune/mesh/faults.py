"""When one process of a job goes down, all do: soon, with one message that names it, and a code that says what to do.

Exit codes: 75 (EX_TEMPFAIL) another process was lost, the same command resumes the run; 2 a mistake of the user, 1 a
defect, here or on the process that is named.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable

from meshtune.errors import UserError
from meshtune.mesh.member import Member
from meshtune.mesh.wire import LOST, Ending

GRACE = 1.0  # seconds the main thread has to end by itself, with its own message
VERDICT = 3.0  # seconds to wait for the reason after a collective operation failed

_said = threading.Lock()


def watch(member: Member, others_left: Callable[[], None]) -> None:
    """From now on the end of the job ends this process, whatever its main thread waits for. See `leave`."""
    member.on_end = lambda ending: _ended(member, ending, others_left)


def leave(member: Member, error: BaseException, others_left: Callable[[], None]) -> None:
    """The main thread ends with `error`: tells the others, or says which other process was the reason.

    Returns if the error is this process's own, so that it goes its usual way; Python's end is then cut short, because
    JAX would wait there for processes that no longer come. Does not return if another process was the reason.
    `others_left` waits for the others where this is process 0: JAX aborts them as soon as that is gone.
    """
    if not isinstance(error, UserError | KeyboardInterrupt | SystemExit):
        # A peer that dies breaks the collective operation under way, often before its loss is known here.
        member.ended.wait(VERDICT)
    if member.ending is not None:
        _say_and_exit(member, member.ending, others_left)
    member.fail(ending_of(member, error))
    others_left()
    atexit.register(_exit, _code(error))


def ending_of(member: Member, error: BaseException, kind: str = "failed") -> Ending:
    """`error`, raised on this process, as the others are told of it."""
    place = member.place
    who = f"process {place.process} of {place.processes} on {member.host}"
    if isinstance(error, UserError):
        what, where, fix = error.what, error.where, error.fix
    else:
        words = str(error).strip().splitlines()
        what, where, fix = f"{type(error).__name__}{': ' + words[0] if words else ''}", None, "look at its log"
    what = f"{who} failed: {what}" if kind == "failed" else what
    return Ending(kind, what, place.process, member.host, where, fix, _code(error))


def _code(error: BaseException) -> int:
    if isinstance(error, UserError):
        return 2
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _ended(member: Member, ending: Ending, others_left: Callable[[], None]) -> None:
    # JAX aborts this process within a tenth of a second after process 0 is gone; its message names nobody.
    until = time.monotonic() + (0.0 if ending.kind == "lost" else GRACE)
    while time.monotonic() < until:
        if member.leaving:
            return
        time.sleep(0.02)
    _say_and_exit(member, ending, others_left)


def _say_and_exit(member: Member, ending: Ending, others_left: Callable[[], None]) -> None:
    if not _said.acquire(blocking=False):
        time.sleep(60)  # the other thread is at it
    show = "\x1b[?25h\n" if sys.stderr.isatty() else "\n"  # a progress bar may have hidden the cursor
    lines = [f"error: {ending.what}", *([f"where: {ending.where}"] if ending.where else [])]
    lines += [f"  fix: {ending.fix}"] if ending.fix else []
    os.write(2, (show + "\n".join(lines) + "\n").encode())
    member.close()
    others_left()
    _exit(ending.code or LOST)


def _exit(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
