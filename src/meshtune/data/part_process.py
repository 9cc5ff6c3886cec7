"""A process that tokenises parts of samples for another one, without its Python lock.

It is a new process, not a fork, since JAX's threads do not survive a fork. It imports neither JAX nor the starting
program, which the processes of multiprocessing run again, and ends when the other process does. Both speak in pickled
objects through its standard input and output: a PartTask, then lists of samples, each answered by a Part or UserError.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType

from meshtune.data.conversation import Sample
from meshtune.data.store import Part
from meshtune.errors import UserError

PROCESSES = "MESHTUNE_DATA_PROCESSES"
_PROGRAM = (
    "from meshtune.data.without_torch import leave_torch_out; leave_torch_out(); "
    "from meshtune.data.part_process import main; main()"
)
_MAX_PROCESSES = 8  # processes, unless PROCESSES says otherwise: one process has to take in what they make


class PartProcess:
    """A process that makes parts, from entering to leaving the context; for one thread."""

    def __init__(self, task: bytes):
        self._task: bytes | None = task  # pickled, sent with the first samples, since the process reads only by then
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "TOKENIZERS_PARALLELISM": "false",
            "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        }
        command = [sys.executable, "-P", "-c", _PROGRAM]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=1 << 20
        )

    def __call__(self, samples: Sequence[Sample]) -> Part:
        """The part of `samples`. Raises UserError as tokenising does, and if the process has died."""
        requests, replies = self._process.stdin, self._process.stdout
        assert requests is not None
        assert replies is not None
        try:
            if self._task is not None:
                requests.write(self._task)
                self._task = None
            pickle.dump(samples, requests, pickle.HIGHEST_PROTOCOL)
            requests.flush()
            reply = pickle.load(replies)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            raise _death_error(self._process.wait()) from None
        if isinstance(reply, UserError):
            raise reply
        return reply

    def __enter__(self) -> PartProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._process.kill()  # it has nothing to finish
        self._process.communicate()


def process_count() -> int:
    """The processes that make parts of large data: as many as there are processors for this one, or what the
    environment variable MESHTUNE_DATA_PROCESSES says; with 1, none but this process.

    Raises UserError if the variable is not a positive number.
    """
    value = os.environ.get(PROCESSES)
    if not value:
        available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(available, _MAX_PROCESSES)
    if not value.isdecimal() or int(value) < 1:
        raise UserError(f"{PROCESSES} is '{value}', not a number of processes", where="environment")
    return int(value)


def _death_error(code: int) -> UserError:
    cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return UserError(
        f"a process that tokenises data has ended with {cause}",
        fix=f"see its message above; if memory ran out (SIGKILL), set {PROCESSES} to a smaller number. What was "
        "prepared is kept",
    )


def main() -> None:
    """Answers requests until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process ends this one
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever libraries print must not stand between the replies
    make = pickle.load(requests).maker()
    while True:
        try:
            samples = pickle.load(requests)
        except EOFError:
            return
        try:
            reply = make(samples)
        except UserError as problem:
            reply = problem
        pickle.dump(reply, replies, pickle.HIGHEST_PROTOCOL)
        replies.flush()
