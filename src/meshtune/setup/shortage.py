"""Memory that the host has free, and errors of memory that ran out, on any device, as errors with a fix.

JAX is not imported here: a command that never used it can run out of memory too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import pathlib
import re
from collections.abc import Callable, Iterator

import psutil

from meshtune.errors import UserError

CGROUPS = pathlib.Path("/sys/fs/cgroup")
RAN_OUT = ("RESOURCE_EXHAUSTED", "OUT_OF_MEMORY", "hipErrorOutOfMemory", "Ran out of memory")  # in messages of XLA
XLA_ERRORS = ("JaxRuntimeError", "XlaRuntimeError")


class MemoryShortage(UserError):
    """Something does not fit the memory that is free."""


@dataclasses.dataclass(frozen=True)
class HostMemory:
    """Bytes of host memory that this process may use at most, and those that are free now."""

    total: int
    available: int


def host_memory() -> HostMemory:
    """The memory of this host, within the limits of this process's control groups and of `ulimit -v`."""
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    for limit, used in (*_cgroup_limits(), *_address_space()):
        total, available = min(total, limit), min(available, limit - used)
    return HostMemory(total, max(0, available))


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """(limit, bytes in use that cannot be reclaimed) of each control group around this process, of both versions."""
    try:
        lines = pathlib.Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        # In a container the path may be the host's, of which only the mounted part is there: its root is tried too.
        root = CGROUPS / "memory" if controllers else CGROUPS
        limit, usage = ("limit_in_bytes", "usage_in_bytes") if controllers else ("max", "current")
        relative = pathlib.PurePosixPath(path.lstrip("/"))
        for group in dict.fromkeys(root / part for part in (relative, *relative.parents)):
            values = _number(group / f"memory.{limit}"), _number(group / f"memory.{usage}")
            if values[0] is not None and values[1] is not None:
                yield values[0], max(0, values[1] - _reclaimable(group / "memory.stat"))


def _number(path: pathlib.Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # 'max' is no limit
        return None


def _reclaimable(path: pathlib.Path) -> int:
    """Bytes of cached files that a control group gives up when memory is short."""
    try:
        match = re.search(r"^(?:total_)?inactive_file (\d+)$", path.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) if match else 0


def _address_space() -> Iterator[tuple[int, int]]:
    try:
        import resource
    except ImportError:  # Windows
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        yield limit, int(psutil.Process().memory_info().vms)


def ran_out(error: BaseException) -> bool:
    """Whether an error says that memory ran out, of a device or of the host."""
    if isinstance(error, MemoryShortage | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return type(error).__name__ in XLA_ERRORS and any(mark in str(error) for mark in RAN_OUT)


def as_shortage(error: BaseException, fix: str) -> MemoryShortage:
    """Turns an error for which `ran_out` is true into a MemoryShortage that names the host's free memory."""
    if isinstance(error, MemoryShortage):
        return error
    host = host_memory()
    free = f"{size_in_words(host.available)} of {size_in_words(host.total)} are free on this host"
    message = " ".join(str(error).split())[:300]
    if isinstance(error, MemoryError | OSError):
        return MemoryShortage(f"the host has too little memory{f' ({message})' if message else ''}: {free}", fix=fix)
    size = re.search(r"(?:allocat\w+|Used) (\d+(?:\.\d+)?)([KMGT]?)", message)
    needed = "what was to be computed"
    if size is not None:
        needed = f"another {size_in_words(float(size[1]) * 1024 ** ' KMGT'.index(size[2] or ' '))}"
    return MemoryShortage(f"the device has no room for {needed}: {message}; {free}", fix=fix)


@contextlib.contextmanager
def explain_shortage(fix: Callable[[], str]) -> Iterator[None]:
    """Turns errors of memory that ran out into MemoryShortages with `fix()` as what to do."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not ran_out(error):
            raise
        raise as_shortage(error, fix()) from error


def size_in_words(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
