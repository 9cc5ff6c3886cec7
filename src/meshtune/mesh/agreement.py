"""Agreement of the processes of a job: code and recipe, errors, and when to stop."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import meshtune.errors
from meshtune.errors import UserError
from meshtune.mesh.processes import Job

MAX_SHOWN = 120  # characters of a value in a message
PACKAGE = pathlib.Path(meshtune.errors.__file__).parent


def require_agreement(job: Job, subject: str, fields: Mapping[str, object], *, fix: str) -> None:
    """Compares `fields` (nested mappings of JSON values) between all processes; every process must call it.

    Raises, on every process: UserError naming the first field that differs, with both values and the processes.
    """
    flat = {name: _short_text(value) for name, value in _flatten(fields)}
    digest = hashlib.sha256(json.dumps(flat, sort_keys=True).encode()).hexdigest()
    difference = job.difference(f"{subject}: digest", digest)
    if difference is None:
        return
    # The fields themselves are sent only once a digest differs.
    index = difference.process_index
    host, first = job.broadcast(f"{subject}: fields", [job.host, flat])
    other_host, other = job.broadcast(f"{subject}: other fields", [job.host, flat], root=index)
    name = next(name for name in sorted({*first, *other}) if first.get(name) != other.get(name))
    count = job.process_count
    group = f"; {difference.equal} of {count} processes agree with process 0" if count > 2 else ""
    raise UserError(
        f"the processes differ in {subject}: {name} is {first.get(name, 'absent')} on process 0 ({host}) and "
        f"{other.get(name, 'absent')} on process {index} ({other_host}){group}",
        fix=fix,
    )


@contextlib.contextmanager
def first_of_each_host(job: Job, tag: str) -> Iterator[tuple[int, int]]:
    """Runs the block on the first process of each host, on all hosts at once, and then on the others, so that they can
    reuse the files it has written. Gives the index of this host and the number of hosts."""
    host, hosts, is_first = job.rank(f"{tag}: hosts", job.host)
    if not is_first:
        job.barrier(tag)
    yield host, hosts
    if is_first:
        job.barrier(tag)


def code_version() -> dict[str, str]:
    """The versions that must be equal for processes to compute the same: JAX, NumPy, and a digest of our source."""
    return {"jax": jax.__version__, "numpy": np.__version__, "meshtune's source": source_digest()}


def source_digest(package: pathlib.Path = PACKAGE) -> str:
    """A digest of every Python file of the package, which detects an edited checkout of the same version."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _flatten(fields: Mapping[str, object], prefix: str = "") -> list[tuple[str, object]]:
    pairs: list[tuple[str, object]] = []
    for name, value in fields.items():
        key = f"{prefix}{name}"
        pairs += _flatten(value, key + ".") if isinstance(value, Mapping) and value else [(key, value)]
    return pairs


def _short_text(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    if len(text) <= MAX_SHOWN:
        return text
    return f"{text[:MAX_SHOWN]}... ({hashlib.sha256(text.encode()).hexdigest()[:8]})"


@dataclasses.dataclass(frozen=True)
class StopDecision:
    """The facts about one update that all processes share.

    `signal` is the highest signal number that any process received (0: none). `seconds[p]` is the time that process p
    reported for the update before. `save` says that process 0 asks for a save, and `counts` are sums over processes.
    """

    signal: int
    seconds: tuple[float, ...]
    save: bool = False
    counts: tuple[int, int] = (0, 0)

    @property
    def skew(self) -> float:
        """Seconds between the fastest and the slowest process."""
        return max(self.seconds) - min(self.seconds)


class StopFlag:
    """All-gathers each process's signal, step time, wish to save and counts, outside the training step.

    `submit` is called after each update is dispatched, and `decision` when that update's metrics are read (one update
    later): decisions come in the order of submission, and the device is never waited for in between. All processes
    must submit equally often. With one process nothing runs on a device.
    """

    multi_process: bool

    def __init__(self, devices: Sequence[jax.Device] | None = None):
        devices = list(jax.devices() if devices is None else devices)
        self.multi_process = len({device.process_index for device in devices}) > 1
        self._pending: list[jax.Array | np.ndarray] = []
        first_device = {device.process_index: index for index, device in reversed(list(enumerate(devices)))}
        self._rows = [first_device[process] for process in sorted(first_device)]
        if self.multi_process:
            # Over all devices of the job, because no other communicator than theirs exists already.
            mesh = Mesh(np.array(devices), ("device",))
            self._sharded = NamedSharding(mesh, PartitionSpec("device"))
            self._gather = jax.jit(lambda flags: flags, out_shardings=NamedSharding(mesh, PartitionSpec()))
            self._local_devices = sum(device.process_index == jax.process_index() for device in devices)
            self._shape = (len(devices), 5)

    def submit(
        self, signal: int | None, seconds: float = 0.0, save: bool = False, counts: tuple[int, int] = (0, 0)
    ) -> None:
        """Submits, for the update just dispatched, the signal that this process received, if any, its step time,
        whether it asks for a save, of which only process 0's answer counts, and counts, exact below 2^24."""
        row = np.array([[signal or 0, seconds, save, *counts]], np.float32)
        if not self.multi_process:
            self._pending.append(row)
            return
        rows = np.repeat(row, self._local_devices, axis=0)
        self._pending.append(self._gather(jax.make_array_from_process_local_data(self._sharded, rows, self._shape)))

    def decision(self) -> StopDecision:
        """The decision for the oldest update whose decision was not yet read."""
        flags = self._pending.pop(0)
        rows = np.asarray(flags.addressable_data(0) if isinstance(flags, jax.Array) else flags)
        rows = rows[self._rows] if self.multi_process else rows
        first, second = rows[:, 3:].astype(np.int64).sum(0).tolist()
        seconds = tuple(float(value) for value in rows[:, 1])
        return StopDecision(int(rows[:, 0].max()), seconds, bool(rows[0, 2]), (first, second))
