"""A job: its files, and its processes."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import re
import signal
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import psutil

from meshtune.board import k8s, slurm
from meshtune.board.slurm import State
from meshtune.runs.output import CONSOLE_LOG, LOGS, RUN, is_claimed

# Each has RECORD, available, command, submit, facts, state_of and cancel.
SCHEDULERS: Mapping[str, ModuleType] = {"slurm": slurm, "kubernetes": k8s}
JOB_VARIABLE = "MESHTUNE_BOARD_JOB"  # the folder of their job, in the environment of all its processes
SECRET = "MESHTUNE_BOARD_SECRET_"  # before the name of a variable that a runner hands to its own job alone


@dataclasses.dataclass(frozen=True)
class ProcessId:
    """A process of a machine since it booted. `started` is in the kernel's ticks since then, not in wall-clock time."""

    host: str
    boot: str
    pid: int
    started: str

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def is_local(self) -> bool:
        """Whether it is one of this machine's, from before a reboot perhaps."""
        return self.host == platform.node() or self.boot == _boot()

    @property
    def is_alive(self) -> bool:
        """Whether this very process still runs on this machine; one that only waits to be reaped does not."""
        return self.boot == _boot() and _started(self.pid) == self.started

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to this very process, if it still runs."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def identify(pid: int) -> ProcessId | None:
    """The identity of a running process of this machine; None if there is none."""
    started = _started(pid)
    return None if started is None else ProcessId(platform.node(), _boot(), pid, started)


def end_processes_of(folder: pathlib.Path, *, but: int | None = None) -> list[int]:
    """Kills every process of this user that belongs to the job in `folder`, except `but`; returns their pids."""
    pids = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid not in (but, os.getpid()) and process.environ().get(JOB_VARIABLE) == str(folder):
                process.kill()
                pids.append(process.pid)
    return pids


def _boot() -> str:
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return str(psutil.boot_time())


def _started(pid: int) -> str | None:
    """When a process started; None if there is none, or it has ended and only waits to be reaped."""
    try:
        # After the program's name, which may hold anything: state first, the start as the 20th.
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
        state, started = fields.split()[0], fields.split()[19]
        return None if state in "ZX" else started
    except (OSError, IndexError):
        pass
    if pathlib.Path("/proc/self/stat").exists():
        return None
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    except psutil.Error:
        return None


JOB, RECIPE, LOG, PROCESS, STOP, EXIT = "job.json", "recipe.yaml", "log.txt", "process.json", "stop", "exit.json"
PROGRESS = "progress.json"
ATTEMPTS = "attempts"
JOB_ID = re.compile(r"[0-9]{5,9}-[a-z0-9-]{1,40}")
MOST_NAME = 200  # characters of a name that are shown
ACTIVE = ("running", "stopping")
STOP_CODES = {-signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGINT}


@dataclasses.dataclass(frozen=True)
class JobRequest:
    """`arguments` are those of `meshtune`, run in `root`. `output` is the run's folder, if the kind has one.

    `devices` is a choice as board.devices reads it. `name` is shown. `scheduler`: one of SCHEDULERS, or none.
    `is_attached`: the run was started without the board, and the arguments would go on with it. `readable` are the
    folders besides `root` that the job may read; None in jobs of earlier versions, which are not checked as they start.
    `runs_code`: its recipe may run code of its own.
    """

    kind: str
    name: str
    arguments: tuple[str, ...]
    root: str
    output: str | None = None
    devices: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scheduler: str | None = None
    is_attached: bool = False
    readable: tuple[str, ...] | None = None
    runs_code: bool = False
    created: str = dataclasses.field(default_factory=lambda: datetime.datetime.now().astimezone().isoformat())

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Job:
    """A job as its files were when it was read."""

    folder: pathlib.Path
    request: JobRequest
    state: State
    runner: ProcessId | None = None
    child: ProcessId | None = None
    exit: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    attempt: int = 1
    record: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the scheduler

    @property
    def log(self) -> pathlib.Path:
        """The file with what the run prints: for one under a scheduler that of its process 0, before that the batch
        script's, or what the cluster has of its first pod; for one that was started without the board its own copy."""
        candidates: list[pathlib.Path] = []
        if self.request.is_attached:
            candidates = [pathlib.Path(self.request.output or "") / CONSOLE_LOG]
        elif self.request.scheduler:
            script = pathlib.Path(self.request.root) / f"slurm-{self.record.get('id')}.out"
            candidates = [pathlib.Path(self.request.output or "") / LOGS / "process-0.log", script]
        log = next((path for path in candidates if path.exists()), self.folder / LOG)
        if self.request.scheduler == "kubernetes" and log.parent == self.folder:
            k8s.LOGS.update(log, self.record)
        return log

    @property
    def id(self) -> str:
        return self.folder.name

    @property
    def output(self) -> pathlib.Path | None:
        """The run's folder."""
        return None if self.request.output is None else pathlib.Path(self.request.output)

    def to_json(self) -> dict[str, Any]:
        """Describes the job for the API."""
        request = self.request
        return {
            "id": self.id,
            "kind": request.kind,
            "name": request.name if len(request.name) <= MOST_NAME else f"{request.name[:MOST_NAME]}…",
            "state": self.state,
            "created": request.created,
            "output": request.output,
            "devices": dict(request.devices),
            "attached": request.is_attached and self.state in ACTIVE,
            "attempt": self.attempt,
            "exit": dict(self.exit),
            "scheduler": SCHEDULERS[request.scheduler].facts(self.record) if request.scheduler else None,
        }


def read_job(folder: pathlib.Path) -> Job | None:
    """The job in a folder; None if it holds none, or one that cannot be read."""
    fields = read_json(folder / JOB)
    try:
        if fields.pop("is_slurm", False):  # of earlier versions
            fields["scheduler"] = "slurm"
        request = JobRequest(**{**fields, "arguments": tuple(fields["arguments"])})
        scheduler = SCHEDULERS[request.scheduler] if request.scheduler else None
    except (KeyError, TypeError):
        return None
    processes = read_json(folder / PROCESS)
    runner, child = _process(processes.get("runner")), _process(processes.get("child"))
    ended = read_json(folder / EXIT)
    attempts = folder / ATTEMPTS
    attempt = 1 + (len(os.listdir(attempts)) if attempts.is_dir() else 0)
    record = {} if scheduler is None else read_json(folder / scheduler.RECORD)
    if request.is_attached:
        state = _attached_state(pathlib.Path(request.output or ""))
    elif scheduler is not None:
        state = _scheduled_state(scheduler, folder, request, record)
    else:
        state = _state(folder, runner, child, ended)
    return Job(folder, request, state, runner, child, ended, attempt, record)


def read_jobs(jobs: pathlib.Path) -> list[Job]:
    """All jobs in the order in which they were asked for."""
    try:
        names = sorted((name for name in os.listdir(jobs) if JOB_ID.fullmatch(name)), key=_number)
    except FileNotFoundError:
        return []
    return [job for name in names if (job := read_job(jobs / name)) is not None]


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object; {} where there is none, or it is broken."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def replace_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    """Writes a file, atomically."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.partial")
    draft.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")
    os.replace(draft, path)


def _number(name: str) -> int:
    return int(name.partition("-")[0])


def _process(fields: Any) -> ProcessId | None:
    try:
        return ProcessId(**fields)
    except TypeError:
        return None


def _state(folder: pathlib.Path, runner: ProcessId | None, child: ProcessId | None, ended: Mapping[str, Any]) -> State:
    asked_to_stop = (folder / STOP).exists()
    if ended:
        code = ended.get("code")
        if code == 0:
            return "finished"
        return "stopped" if code is None or (code in STOP_CODES and asked_to_stop) else "failed"
    if runner is None:
        return "queued"
    if runner.is_alive or (child is not None and child.is_alive):
        return "stopping" if asked_to_stop else "running"
    return "lost" if runner.is_local else "elsewhere"


def _attached_state(output: pathlib.Path) -> State:
    """The state of a run that was started without the board: what it says of itself, while a process holds its lock."""
    match read_json(output / RUN).get("status"):
        case "finished":
            return "finished"
        case "interrupted":
            return "stopped"
        case _:
            return "running" if is_claimed(output) else "lost"


def _scheduled_state(
    scheduler: ModuleType, folder: pathlib.Path, request: JobRequest, record: Mapping[str, Any]
) -> State:
    if not record:
        return "queued"  # it is being submitted
    status = None if request.output is None else read_json(pathlib.Path(request.output) / RUN).get("status")
    return scheduler.state_of(record, (folder / STOP).exists(), status)
