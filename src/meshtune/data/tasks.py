"""Runs the tasks of preparing data: in other processes, and with other hosts and commands that prepare the same data.

A task writes one file (a shard, a range of checked records) that depends on nothing but the task. Whoever needs it
makes it, unless it is there or another process is making it, which holds a lock that the operating system takes away
with the process: so tasks of a process that was killed are made by the others, and nothing is made twice. On a file
system without locks it may be, with the same result.

A process for tasks is a new one, not a fork, since JAX's threads do not survive a fork. It imports neither JAX nor the
starting program, which the processes of multiprocessing run again, and ends when the other process does. Both speak in
pickled objects through its standard input and output: a PartTask, then tasks, each answered by its result, None where
another process is making it, or a UserError.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import pathlib
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol

from meshtune.data.tokens import Tokenize
from meshtune.errors import UserError

PROCESSES = "MESHTUNE_DATA_PROCESSES"
_PROGRAM = (
    "from meshtune.data.without_torch import leave_torch_out; leave_torch_out(); "
    "from meshtune.data.tasks import main; main()"
)
_MAX_PROCESSES = 8  # processes, unless PROCESSES says otherwise
_WAIT = 0.5  # seconds between looks for what other processes make


class Task(Protocol):
    """Work whose result is in `file`. `load()` returns the result of an earlier `make`; None if there is none. Without
    a file the result is made for whoever asks."""

    @property
    def file(self) -> pathlib.Path | None: ...

    def make(self, tokenize: Tokenize, /) -> Any: ...

    def load(self) -> Any: ...


def complete(task: Task, tokenize: Tokenize) -> Any:
    """The result of a task, made if it is not there; None while another process is making it."""
    if task.file is None:
        return task.make(tokenize)
    result = task.load()
    if result is not None:
        return result
    with _claim(task.file) as is_free:
        return (task.load() or task.make(tokenize)) if is_free else None


@contextlib.contextmanager
def _claim(file: pathlib.Path) -> Iterator[bool]:
    """Locks the making of a file; gives False while another process makes it."""
    with contextlib.ExitStack() as stack:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o666)
            stack.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass  # the file system has no locks; where it cannot be written, making the file says so
        yield True


def run_tasks(
    tasks: Sequence[Task], task: bytes, processes: int, share: tuple[int, int], done: Callable[[int], None]
) -> list[Any]:
    """The results of tasks in order, made by `processes` new processes (1: this one) that are given `task`, a pickled
    PartTask.

    With a `share` of (index, count) the tasks of this share come first, then those that no other process has made or is
    making. `done` is told the number of results. Raises UserError as the tasks do: for the first of the share's order.
    """
    index, count = share
    order = sorted(range(len(tasks)), key=lambda number: (number - index) % count)
    board = _Board(collections.deque(order))
    with contextlib.ExitStack() as stack:
        if processes == 1:
            board.work(tasks, _here(task), done)
        else:
            makers = [stack.enter_context(TaskProcess(task)) for _ in range(min(processes, len(tasks)))]
            threads = [threading.Thread(target=board.work, args=(tasks, make, done)) for make in makers]
            stack.callback(board.close)  # before the processes are killed, which threads would report
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    if board.errors:
        raise board.errors[min(board.errors, key=order.index)]
    return [board.results[number] for number in range(len(tasks))]


def _here(task: bytes) -> Callable[[Task], Any]:
    tokenize = pickle.loads(task).tokenize()
    return lambda item: complete(item, tokenize)


class _Board:
    """The numbers of tasks that are open, their results and errors, for threads that work on them."""

    def __init__(self, remaining: collections.deque[int]):
        self.remaining, self.results = remaining, dict[int, Any]()
        self.errors, self.stop, self.is_closed = dict[int, BaseException](), threading.Event(), False

    def close(self) -> None:
        """Begins no more tasks, and records no more errors."""
        self.is_closed = True
        self.stop.set()

    def work(self, tasks: Sequence[Task], make: Callable[[Task], Any], done: Callable[[int], None]) -> None:
        """Makes tasks until none is open, or one has failed."""
        skipped = 0  # tasks in a row that another process is making
        while not self.stop.is_set():
            try:
                number = self.remaining.popleft()
            except IndexError:
                return
            try:
                result = make(tasks[number])
            except BaseException as problem:
                if not self.is_closed:
                    self.errors[number] = problem
                self.stop.set()
                return
            if result is not None:
                self.results[number], skipped = result, 0
                done(len(self.results))
                continue
            self.remaining.append(number)
            skipped += 1
            if skipped >= len(self.remaining):
                self.stop.wait(_WAIT)


class TaskProcess:
    """A process that completes tasks, from entering to leaving the context; for one thread."""

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

    def __call__(self, task: Task) -> Any:
        """Completes a task. Raises UserError as the task does, and if the process has died."""
        requests, replies = self._process.stdin, self._process.stdout
        assert requests is not None
        assert replies is not None
        try:
            if self._task is not None:
                requests.write(self._task)
                self._task = None
            pickle.dump(task, requests, pickle.HIGHEST_PROTOCOL)
            requests.flush()
            reply = pickle.load(replies)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            raise _death_error(self._process.wait()) from None
        if isinstance(reply, UserError):
            raise reply
        return reply

    def kill(self) -> None:
        """Ends the process, which has nothing to finish."""
        self._process.kill()

    def __enter__(self) -> TaskProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.kill()
        self._process.communicate()


class TaskPool:
    """Completes tasks in `count` processes, which are given `task`, a pickled PartTask. `close` ends them."""

    def __init__(self, task: bytes, count: int):
        self._stack = contextlib.ExitStack()
        self._free: queue.SimpleQueue[TaskProcess] = queue.SimpleQueue()
        processes = [self._stack.enter_context(TaskProcess(task)) for _ in range(count)]
        for process in processes:
            self._free.put(process)
        self._threads = ThreadPoolExecutor(count, "tasks")
        self._stack.callback(self._threads.shutdown, cancel_futures=True)
        for process in processes:
            self._stack.callback(process.kill)  # first, so that no thread waits for one

    def submit(self, task: Any) -> Future[Any]:
        """The result of a task. The future raises UserError as it does, and if a process has died."""
        return self._threads.submit(self._complete, task)

    def _complete(self, task: Any) -> Any:
        process = self._free.get()
        try:
            return process(task)
        finally:
            self._free.put(process)

    def close(self) -> None:
        self._stack.close()


def process_count() -> int:
    """The processes that prepare large data: as many as there are processors for this one, or what the
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
    tokenize = pickle.load(requests).tokenize()
    while True:
        try:
            task = pickle.load(requests)
        except EOFError:
            return
        try:
            reply = complete(task, tokenize)
        except UserError as problem:
            reply = problem
        pickle.dump(reply, replies, pickle.HIGHEST_PROTOCOL)
        replies.flush()
