"""Runs code that a model wrote, with tests, in a process of its own.

It has limits of time, memory, files and processes, no environment and a temporary directory, and is ended with what it
has started. This keeps accidents away and is no security boundary: such code can read what the user can read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

FILE_BYTES = 1 << 20
OPEN_FILES = 64
START_SECONDS = 5.0  # for starting Python, beside the code's own time

# Refused are new processes (a fork bomb's too, where root has no limit of them), signals to others, connections, and
# ctypes, which could do all of these. The result is written with a word that the code does not get to see.
_PROGRAM = """
import json, os, resource, sys
task = json.load(sys.stdin)
report = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
for name, limit in task["limits"].items():
    resource.setrlimit(getattr(resource, name), (limit, limit))
def refuse(event, arguments, refused=frozenset(task["refused"])):
    if event in refused:
        raise PermissionError(event + " is refused")
def refuse_fork(*arguments):
    raise PermissionError("processes are refused")
import _posixsubprocess
_posixsubprocess.fork_exec = refuse_fork
sys.addaudithook(refuse)
word, code, tests, passed = task.pop("word"), task["code"], task["tests"], []
def main():
    space = {"__name__": "__main__"}
    exec(compile(code, "completion.py", "exec"), space)
    for test in tests:
        try:
            exec(compile(test, "test.py", "exec"), space)
            passed.append(test)
        except (Exception, SystemExit):
            pass
try:
    main()
except (Exception, SystemExit):
    passed = []
os.write(report, f"{word} {len(passed)}".encode())
os._exit(0)
"""
_REFUSED = (
    "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system", "os.kill", "os.killpg", "subprocess.Popen",
    "pty.spawn", "socket.connect", "socket.bind", "ctypes.dlopen",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Limits:
    """Seconds of processor time, and as many of the clock with those for starting; bytes of memory."""

    seconds: float
    memory: int


def passed_share(code: str, tests: Sequence[str], limits: Limits) -> float:
    """The share of the tests that raise nothing after the code; 0 where that fails or the limits are reached."""
    word = secrets.token_hex(16)
    task = {
        "code": code,
        "tests": [str(test) for test in tests],
        "word": word,
        "refused": _REFUSED,
        "limits": {
            "RLIMIT_CPU": max(1, round(limits.seconds)),
            "RLIMIT_AS": limits.memory,
            "RLIMIT_FSIZE": FILE_BYTES,
            "RLIMIT_NOFILE": OPEN_FILES,
            "RLIMIT_NPROC": 0,
            "RLIMIT_CORE": 0,
        },
    }
    with tempfile.TemporaryDirectory(prefix="meshtune-code-") as folder, tempfile.TemporaryFile() as report:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=report,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},  # NumPy does not start without its threads
            start_new_session=True,
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):
                process.communicate(json.dumps(task).encode(), timeout=limits.seconds + START_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        report.seek(0)
        first, _, count = report.read(100).decode("ascii", "replace").partition(" ")
    return int(count) / len(tests) if first == word and count.isdecimal() else 0.0
