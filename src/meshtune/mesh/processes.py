"""The processes of a job, and the start-up of one of them. JAX's backends must not be initialised before `start`."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from meshtune.errors import UserError
from meshtune.mesh.accelerators import local_device_ids, visible_gpus
from meshtune.mesh.reductions import REDUCTIONS, Difference
from meshtune.mesh.rendezvous import ProcessInfo, detect_process_info

if TYPE_CHECKING:
    from meshtune.mesh.client import Client
    from meshtune.mesh.coordinator import Coordinator

TIMEOUT = 6 * 3600.0  # seconds to wait for a process that is alive: process 0 may prepare data for hours


@dataclasses.dataclass
class Job:
    """The processes of a run, as one of them sees them; a context manager that reports how this process ends.

    With one process there is no client and no coordinator, and nothing is sent.

    The methods that reduce values (small, JSON) block until all processes have called them with the same `tag`. They
    raise UserError if a process was lost or failed, or did not call within TIMEOUT.
    """

    info: ProcessInfo
    client: Client | None = None
    coordinator: Coordinator | None = None

    @property
    def process_index(self) -> int:
        return self.info.process_index

    @property
    def process_count(self) -> int:
        return self.info.process_count

    @property
    def is_main_process(self) -> bool:
        """Whether this is process 0, which shows and writes what only one process should."""
        return self.info.process_index == 0

    @property
    def host(self) -> str:
        """The name of this process's host."""
        return self.client.host if self.client else socket.gethostname()

    def barrier(self, tag: str) -> None:
        """Waits for all processes."""
        self._reduce("first", tag, None)

    def broadcast(self, tag: str, value: Any, root: int = 0, timeout: float = TIMEOUT) -> Any:
        """The value of process `root`; those of the others are not sent."""
        result = self._reduce("first", tag, value if self.process_index == root else None, timeout)
        return None if result is None else result[1]

    def first(self, tag: str, value: Any) -> tuple[int, Any] | None:
        """(process, value) of the first process whose value is not None, if there is one."""
        result = self._reduce("first", tag, value)
        return None if result is None else (result[0], result[1])

    def gather(self, tag: str, value: Any) -> list[Any]:
        """The values of all processes, in order, on process 0; an empty list on the others."""
        return self._reduce("gather", tag, value) or []

    def maximum(self, tag: str, values: Sequence[float]) -> list[Any]:
        """The highest number in each place of all processes' lists."""
        return self._reduce("maximum", tag, values)

    def minimum(self, tag: str, values: Sequence[float]) -> list[Any]:
        """The lowest number in each place of all processes' lists."""
        return [-value for value in self.maximum(tag, [-value for value in values])]

    def all(self, tag: str, condition: bool) -> bool:
        """Whether the condition is true on every process."""
        return bool(self.minimum(tag, [condition])[0])

    def difference(self, tag: str, value: Any) -> Difference | None:
        """The first process whose value is not that of process 0, if there is one."""
        result = self._reduce("difference", tag, value)
        return None if result is None else Difference(*result)

    def merge(self, tag: str, mapping: Mapping[str, Any]) -> dict[str, Any]:
        """One mapping of those of all processes."""
        return self._reduce("merge", tag, mapping)

    def rank(self, tag: str, text: str) -> tuple[int, int, bool]:
        """(the number of this text among the distinct ones of all processes, how many are distinct, whether this is the
        first process with it)"""
        number, distinct, is_first = self._reduce("rank", tag, text)
        return number, distinct, is_first

    def _reduce(self, reduction: str, tag: str, value: object, timeout: float = TIMEOUT) -> Any:
        if self.client is None:
            return REDUCTIONS[reduction]([value])[0]
        return self.client.reduce(reduction, tag, value, timeout)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self.client is None:
            return
        if error is not None:
            from meshtune.mesh.join import leave_on_error

            leave_on_error(self.client, error, (lambda: None) if self.coordinator is None else self.coordinator.close)
            return
        self.barrier("end of the run")
        self.client.close()
        # Every process has reached the end, so none waits for another when JAX closes its own connections.
        import jax

        jax.distributed.shutdown()
        if self.coordinator is not None:
            self.coordinator.close()


SINGLE_PROCESS = Job(ProcessInfo())


def start(info: ProcessInfo | None = None, *, timeout: float | None = None) -> Job:
    """Joins the other processes of the job, if there are any, and initialises JAX for the devices of all of them.

    `info` defaults to what the launcher's environment variables say (mesh.rendezvous). Returns within `timeout` seconds
    (default: MESHTUNE_START_TIMEOUT, or 300).
    Raises, on every process: UserError if the coordinator cannot be reached, if processes are missing, if two have the
    same index, or if they were launched with different process counts.
    """
    info = info or detect_process_info()
    gpus = visible_gpus()
    device_ids = local_device_ids(info, gpus)
    if info.process_count == 1:
        if device_ids is not None:
            import jax

            for platform in ("cuda", "rocm"):
                jax.config.update(f"jax_{platform}_visible_devices", ",".join(map(str, device_ids)))
        return Job(info)
    from meshtune.mesh.join import join  # the code of several processes is imported only for them

    return Job(info, *join(info, gpus, device_ids, timeout))


@contextlib.contextmanager
def raise_collectively(job: Job, tag: str) -> Iterator[None]:
    """Synchronises all processes at the end of the block, and raises on all a UserError or OSError that one raised.

    Every process must enter the block with the same `tag`. It may hold collective operations only if no process can
    leave it before they have completed.
    """
    local_error: UserError | OSError | None = None
    try:
        yield
    except (UserError, OSError) as error:
        local_error = error
    error = job.first(tag, None if local_error is None else _fields(local_error))
    if local_error is not None:
        raise local_error
    if error is not None:
        process_index, (message, where, fix) = error
        raise UserError(f"process {process_index} of {job.process_count}: {message}", where=where, fix=fix)


def _fields(error: UserError | OSError) -> tuple[str, str | None, str | None]:
    if isinstance(error, UserError):
        return error.what, error.where, error.fix
    return error.strerror or str(error), str(error.filename) if error.filename else None, None
