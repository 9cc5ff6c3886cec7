"""Runs under Slurm: submitted by `meshtune launch slurm`, watched by squeue, stopped by scancel."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from meshtune.errors import UserError
from meshtune.launch.options import SlurmOptions

State = Literal["queued", "running", "stopping", "finished", "stopped", "failed", "lost", "elsewhere"]
RECORD = "slurm.json"
SCRIPT = "job.sbatch"
OPTIONS = {"nodes": int, "gpus": int, "processes": int, "time": str, "partition": str, "account": str, "qos": str}
FRESH_SECONDS = 3.0
COMMAND_SECONDS = 30.0
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "CONFIGURING", "SUSPENDED", "RESIZING")
ENDED = ("", "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")


def available() -> bool:
    """Whether jobs can be submitted from this machine."""
    return shutil.which("sbatch") is not None and shutil.which("squeue") is not None


def command(value: object, recipe: str, options: list[str]) -> tuple[str, ...]:
    """The arguments of the command that submits: {"nodes": 2, "gpus": 8, "time": "4:00:00", ...}. Raises: UserError."""
    if not available():
        raise UserError("there is no Slurm on this machine", where="slurm", fix="start the board on a login node")
    flags = option_flags(value, OPTIONS, SlurmOptions, "slurm")
    return ("launch", "slurm", recipe, *options, *flags, "--out", f"{{job}}/{SCRIPT}", "--submit")


def option_flags(value: object, types: Mapping[str, type], options: type, where: str) -> list[str]:
    """Options of the dataclass `options`, those that `types` has, as arguments of a command. Raises: UserError."""
    if not isinstance(value, dict) or set(value) - set(types):
        raise UserError(f"the options are {', '.join(types)}", where=where, fix="leave the others out")
    for name, option in value.items():
        if type(option) is not types[name]:
            problem = f"{option!r} is not a {types[name].__name__}"
            raise UserError(problem, where=f"{where}.{name}", fix="correct it")
        if isinstance(option, str) and not re.fullmatch(r"[\w.,:@/+-]*", option):
            raise UserError(f"{option!r} is not a name", where=f"{where}.{name}", fix="correct it")
    fields = {field.name: field for field in dataclasses.fields(options)}
    missing = [name for name in types if not value.get(name) and fields[name].default is dataclasses.MISSING]
    if missing:
        raise UserError(f"{missing[0]} is missing", where=f"{where}.{missing[0]}", fix="give it")
    options(**value)  # refuses what the scheduler would
    flags = {name: (field.metadata.get("flags") or (f"--{name}",))[0] for name, field in fields.items()}
    return [part for name, option in value.items() for part in (flags[name], str(option))]


def submit(folder: pathlib.Path, root: str, arguments: list[str]) -> dict[str, str]:
    """Submits the command of a job; returns {"id": Slurm's number}. Raises: UserError with what the command said."""
    command = [sys.executable, "-m", "meshtune", *arguments]
    with (folder / "log.txt").open("ab") as log:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
        log.write((done.stdout + done.stderr).encode())
    match = re.search(r"job (\d+) submitted", done.stdout)
    if done.returncode or match is None:
        raise UserError(f"the job was not submitted: {done.stderr.strip() or done.stdout.strip()}", where="slurm")
    QUEUE.refresh()
    return {"id": match[1]}


class Status(NamedTuple):
    """Slurm's word for a job's state, "" for a job that it no longer knows and None where squeue does not answer; and
    why a job waits, "" for one that does not."""

    state: str | None
    reason: str = ""


class Queue:
    """The states of all of the user's jobs in Slurm, by one query at most every FRESH_SECONDS."""

    def __init__(self):
        self._lock = threading.Lock()
        self._read_at, self._statuses = float("-inf"), None

    def status(self, number: str) -> Status:
        """The status of a job, perhaps of some seconds ago."""
        with self._lock:
            if time.monotonic() - self._read_at >= FRESH_SECONDS:
                self._statuses = _read_statuses()
                self._read_at = time.monotonic()
            return Status(None) if self._statuses is None else self._statuses.get(number, Status(""))

    def refresh(self) -> None:
        """Asks again at the next reading."""
        with self._lock:
            self._read_at = float("-inf")


QUEUE = Queue()


def _read_statuses() -> dict[str, Status] | None:
    """The statuses of the user's jobs by number, ended ones for as long as Slurm remembers them; None where squeue does
    not answer."""
    done = _run("squeue", "--noheader", "--me", "--states=all", "--format=%A %T %r")
    if done is None or done.returncode:
        return None
    statuses: dict[str, Status] = {}
    for line in done.stdout.splitlines():
        number, state, *reason = line.split(maxsplit=2)
        waits = state in WAITING and reason and reason[0] != "None"
        statuses[number] = Status(state, reason[0] if waits else "")
    return statuses


def facts(record: Mapping[str, Any]) -> dict[str, str] | None:
    """Slurm's number of a job, and why it waits ("" where it does not); None before it is submitted."""
    if "id" not in record:
        return None
    return {"name": "slurm", "id": record["id"], "reason": QUEUE.status(str(record["id"])).reason}


def state_of(record: Mapping[str, Any], asked_to_stop: bool, run_status: str | None) -> State:
    """The state of a job from Slurm's word and the status in run.json."""
    word = QUEUE.status(str(record.get("id", ""))).state
    if word is None:
        return "elsewhere"
    if word in WAITING:
        return "stopping" if asked_to_stop else "queued"
    if word not in ENDED:
        return "stopping" if asked_to_stop else "running"
    if run_status == "finished":
        return "finished"
    return "stopped" if asked_to_stop or word == "CANCELLED" else "failed"


def cancel(record: Mapping[str, Any], *, now: bool) -> None:
    """Ends a job: its processes save and stop, and it is not put into the queue again. With `now`, at once."""
    number = str(record.get("id", ""))
    waiting = QUEUE.status(number).state in WAITING
    _run("scontrol", "update", f"JobId={number}", "Requeue=0")  # else the script, stopped by a signal, asks for it
    _run("scancel", *([] if now or waiting else ["--signal=TERM"]), number)
    QUEUE.refresh()


def _run(*command: str) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
