"""The processes of a job, and the start-up of one of them. JAX's backends must not be initialised before `start`."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from meshtune.errors import UserError
from meshtune.mesh.accelerators import local_device_ids, visible_gpus
from meshtune.mesh.rendezvous import ProcessInfo, detect_process_info

if TYPE_CHECKING:
    from meshtune.mesh.client import Client
    from meshtune.mesh.coordinator import Coordinator

EXCHANGE_TIMEOUT = 6 * 3600.0  # seconds to wait for a process that is alive: process 0 may prepare data for hours


@dataclasses.dataclass
class Job:
    """The processes of a run, as one of them sees them; a context manager that reports how this process ends.

    With one process there is no client and no coordinator, and nothing is exchanged.
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

    def exchange(self, tag: str, value: object, timeout: float = EXCHANGE_TIMEOUT) -> list[Any]:
        """The `value` (small, JSON) of every process, in order of process; all of them must call with the same `tag`.

        Blocks until all have called. Raises: UserError if a process was lost or failed, or did not call within
        `timeout` seconds.
        """
        if self.client is None:
            return [value]
        return self.client.exchange(tag, value, timeout)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self.client is None:
            return
        if error is not None:
            from meshtune.mesh.join import leave_on_error

            leave_on_error(self.client, error, (lambda: None) if self.coordinator is None else self.coordinator.close)
            return
        self.exchange("end of the run", None)
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
    errors = job.exchange(tag, None if local_error is None else _fields(local_error))
    if local_error is not None:
        raise local_error
    for process_index, fields in enumerate(errors):
        if fields is not None:
            message, where, fix = fields
            raise UserError(f"process {process_index} of {job.process_count}: {message}", where=where, fix=fix)


def _fields(error: UserError | OSError) -> tuple[str, str | None, str | None]:
    if isinstance(error, UserError):
        return error.what, error.where, error.fix
    return error.strerror or str(error), str(error.filename) if error.filename else None, None
