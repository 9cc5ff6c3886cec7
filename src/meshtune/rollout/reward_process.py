"""The process in which reward functions run: a hanging, crashing or greedy one ends it, and not the training.

It is a new process, which imports no JAX and ends when the other does. Functions are called in its main thread, where
their own signals and libraries work; a call that takes too long is ended by a watchdog that needs no cooperation, after
it has written down where the call was.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import faulthandler
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from meshtune.errors import UserError
from meshtune.rollout.reward_functions import (
    Completions,
    NamedFunction,
    RewardLog,
    call_function,
    gather_functions,
    load_function,
)
from meshtune.rollout.reward_kinds import KINDS, allowance

_PROGRAM = "from meshtune.rollout.reward_process import main; main()"
LOADING = 300.0  # seconds for imports of reward functions
GRACE = 10.0  # seconds in which the watchdog must have acted


@dataclasses.dataclass(frozen=True)
class RewardTask:
    """A reward to load: its name, its options as JSON values, and its timeout in seconds."""

    name: str
    options: Mapping[str, Any]
    timeout: float

    def limit(self, completions: int) -> float:
        """The seconds after which a call is ended."""
        return self.timeout + allowance(self.options, completions)


@dataclasses.dataclass(frozen=True)
class LoadedReward:
    """The `files` that a reward's scores depend on, and whether its function has a parameter for environments."""

    files: tuple[Path, ...]
    names_environments: bool


class RewardProcess:
    """Starts a process and loads the rewards of `tasks` there. Raises UserError as loading does."""

    def __init__(self, tasks: Sequence[RewardTask]):
        self._tasks, self._count = tasks, 0
        self.loaded: list[LoadedReward] = []
        self._trace = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        self._connection, theirs = Pipe()
        descriptors = (theirs.fileno(), self._trace.fileno())
        path = os.pathsep.join(filter(None, (*sys.path, str(Path.cwd()))))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, *map(str, descriptors)],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            pass_fds=descriptors,
            start_new_session=True,  # what functions start ends with it
        )
        theirs.close()
        self._connection.send(tasks)
        try:
            self.loaded = self._receive("loading", LOADING)
        except BaseException:
            self.close()
            raise

    def start(self, completions: Completions, indices: Sequence[int]) -> None:
        """Begins to score completions with some of the rewards. Environments stay behind."""
        origins = [str(origin) for origin in completions.origins]
        sent = dataclasses.replace(completions, origins=origins, environments=None)
        self._count = len(completions)
        try:
            self._connection.send((sent, list(indices)))
        except OSError:  # it was killed between two rollouts
            raise self._death(" or ".join(f"'{task.name}'" for task in self._tasks), 0.0) from None

    def results(self, indices: Sequence[int]) -> tuple[dict[int, list[float]], RewardLog]:
        """The rewards of each function, and what they logged. Raises UserError as the functions' calls do."""
        rewards: dict[int, list[float]] = {}
        while len(rewards) < len(indices):
            pending = [self._tasks[index] for index in indices if index not in rewards]
            running = max(task.limit(self._count) for task in pending)
            index, values = self._receive(" or ".join(f"'{task.name}'" for task in pending), running)
            rewards[index] = values
        return rewards, self._receive("logging", GRACE)

    def _receive(self, names: str, seconds: float) -> Any:
        try:
            if not self._connection.poll(seconds + GRACE):
                raise self._death(names, seconds)
            reply = self._connection.recv()
        except (EOFError, ConnectionError):
            raise self._death(names, seconds) from None
        if isinstance(reply, UserError):
            raise reply
        if isinstance(reply, CallStart):
            task = self._tasks[reply.index]
            return self._receive(f"'{task.name}'", task.limit(self._count))
        return reply

    def _death(self, names: str, seconds: float) -> UserError:
        """Ends a process that has ended or does not answer, and gives the error for it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)  # it has closed its end of the pipe
        code = self._process.returncode
        self.close()
        self._trace.seek(0)
        trace = self._trace.read().decode("utf-8", "replace")
        where = f"rewards, {names}"
        if trace or code is None:
            return UserError(
                f"the reward {names} did not return within {seconds:g} seconds",
                where=_innermost_line(trace, [file for loaded in self.loaded for file in loaded.files]) or where,
                fix="correct the function, or raise its `timeout` (seconds for all completions of a rollout)",
            )
        cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return UserError(
            f"the process of the reward {names} has ended with {cause}",
            where=where,
            fix="see its message above (SIGKILL: memory ran out); a function must return, and neither exit nor crash",
        )

    def close(self) -> None:
        """Ends the process and what it has started."""
        if not self._connection.closed:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._connection.close()


def _innermost_line(trace: str, files: Sequence[Path]) -> str | None:
    """The innermost line of some files in a traceback of faulthandler, else of any file."""
    lines = re.findall(r'File "(.+)", line (\d+) in (.+)', trace)
    in_files = [line for line in lines if Path(line[0]) in files]
    return next((f"{file}, line {number}, in {name}" for file, number, name in in_files or lines), None)


@dataclasses.dataclass(frozen=True)
class CallStart:
    """Says that the call of a reward's function begins."""

    index: int


def main() -> None:
    """Loads rewards and answers requests until there are no more."""
    connection, trace = Connection(int(sys.argv[1])), int(sys.argv[2])
    try:
        tasks: Sequence[RewardTask] = connection.recv()
        with _watchdog(LOADING, trace):
            loaded = [_load(task) for task in tasks]
        functions = [function for function, _ in loaded]
        connection.send([LoadedReward(tuple(files), function.names_environments) for function, files in loaded])
    except UserError as problem:
        connection.send(problem)
        return
    with asyncio.Runner() as runner:  # one event loop for all rollouts: functions keep clients in it
        while True:
            try:
                completions, indices = connection.recv()
            except EOFError:
                return
            try:
                _answer(connection, runner, tasks, functions, completions, indices, trace)
            except UserError as problem:
                connection.send(problem)


def _load(task: RewardTask) -> tuple[NamedFunction, list[Path]]:
    kind = task.options["kind"]
    if kind == "function":
        return load_function(task.options["function"], task.name, task.timeout)
    return NamedFunction(task.name, f"rewards, {kind}", KINDS[kind](task.options), task.timeout), []


def _answer(
    connection: Connection,
    runner: asyncio.Runner,
    tasks: Sequence[RewardTask],
    functions: Sequence[NamedFunction],
    completions: Completions,
    indices: Sequence[int],
    trace: int,
) -> None:
    log = RewardLog(count=len(completions))
    together = [index for index in indices if functions[index].is_async]
    for index in indices:
        if index not in together:
            connection.send(CallStart(index))
            with _watchdog(tasks[index].limit(len(completions)), trace):
                values = call_function(functions[index], completions, log)
            connection.send((index, values))
    if together:
        with _watchdog(max(tasks[index].timeout for index in together) + 1, trace):
            results = runner.run(gather_functions([functions[index] for index in together], completions, log))
        for index, values in zip(together, results, strict=True):
            connection.send((index, values))
    connection.send(log)


@contextlib.contextmanager
def _watchdog(seconds: float, trace: int):
    """Ends this process, with a traceback in the file `trace`, unless the block ends within some seconds."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=trace)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
