"""Start-up of one process of a job: it finds its peers, joins them, and tells them how it ends.

Nothing of JAX's backends may be touched before `start`.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import jax

from meshtune.errors import UserError
from meshtune.mesh import faults
from meshtune.mesh.accelerators import own_gpus, visible_gpus
from meshtune.mesh.hub import Hub, other_hub
from meshtune.mesh.member import Member
from meshtune.mesh.peers import Place, find_place

START_TIMEOUT = 300.0  # seconds for all processes to come; MESHTUNE_START_TIMEOUT
LINE_TIMEOUT = 6 * 3600.0  # seconds one process may wait for another that lives: process 0 may prepare data for hours


@dataclasses.dataclass
class Job:
    """The processes of this run, seen from one of them. As a context it tells the others how this one ended.

    With one process it does nothing.
    """

    place: Place
    member: Member | None = None
    hub: Hub | None = None

    @property
    def process(self) -> int:
        """This process's number."""
        return self.place.process

    @property
    def processes(self) -> int:
        """How many there are."""
        return self.place.processes

    @property
    def first(self) -> bool:
        """Whether this is process 0, which shows and writes what one process does for all."""
        return self.place.process == 0

    @property
    def host(self) -> str:
        """The name of this process's host."""
        return self.member.host if self.member else socket.gethostname()

    def exchange(self, tag: str, value: Any, timeout: float = LINE_TIMEOUT) -> list[Any]:
        """Every process's `value` (anything JSON holds, small), in order of process; all call it with the same `tag`.

        Returns when all have called. Raises: UserError if one was lost or failed, or did not call in time.
        """
        if self.member is None:
            return [value]
        return self.member.exchange(tag, value, timeout)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self.member is None:
            return
        if error is not None:
            faults.leave(self.member, error, _others_left(self.hub))
            return
        self.exchange("end of the run", None)
        self.member.close()
        # All are here, so that none waits for another; after this, JAX's own connections close in order.
        jax.distributed.shutdown()
        if self.hub is not None:
            self.hub.close()


def start(place: Place | None = None, *, timeout: float | None = None) -> Job:
    """Joins the other processes of the job, if there are any, and sets JAX up for all of their devices.

    `place` is what the launcher says (mesh.peers) unless given. Returns within `timeout` seconds (default 300, or
    MESHTUNE_START_TIMEOUT).
    Raises, on every process: UserError if the coordinator cannot be reached, processes are missing, a number is taken
    twice, or they were told of different numbers of processes.
    """
    place = place or find_place()
    gpus = visible_gpus()
    own = own_gpus(place, gpus)
    if place.processes == 1:
        if own is not None:
            for platform in ("cuda", "rocm"):
                jax.config.update(f"jax_{platform}_visible_devices", ",".join(map(str, own)))
        return Job(place)
    timeout = timeout or _seconds("MESHTUNE_START_TIMEOUT", START_TIMEOUT)
    began = time.monotonic()
    host, port = place.address
    hub = Hub(place) if place.process == 0 else None
    member = Member(place, ("localhost", port) if hub else (host, port), timeout)
    if hub is not None and (elsewhere := other_hub(place, hub.secret)):
        raise UserError(
            f"two processes say that they are number 0: one on {socket.gethostname()}, and one at {elsewhere}",
            where=f"launched by {place.launcher}",
            fix="give every process its own number (MESHTUNE_PROCESS), from 0 on",
        )
    port = _free_port() if hub is not None else None
    hello = {"host": member.host, "jax": jax.__version__, "port": port, "gpus": gpus}
    hellos = _gather(hub, member, hello, timeout - (time.monotonic() - began))
    _alike(hellos)
    faults.watch(member, _others_left(hub))
    _initialize(place, f"{host}:{hellos[0]['port']}", own, timeout)
    return Job(place, member, hub)


def _others_left(hub: Hub | None) -> Callable[[], None]:
    return hub.close if hub is not None else lambda: None


def _gather(hub: Hub | None, member: Member, hello: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
    if hub is None:
        # The hub says who is missing; a little more time than it has, so that it can.
        return member.exchange("start", hello, timeout + 10)
    try:
        return member.exchange("start", hello, timeout)
    except UserError as error:
        found = _who_is_missing(hub, member, timeout) or error
    hub.end(faults.ending_of(member, found, kind="start"))
    raise found


def _who_is_missing(hub: Hub, member: Member, timeout: float) -> UserError | None:
    missing = hub.missing()
    if not missing or member.ending is not None:
        return None
    return UserError(
        f"{_names(missing)} of {member.place.processes} did not come to {member.place.coordinator} in {timeout:.0f} s",
        where=f"process 0 on {member.host}",
        fix="check that they were launched, that they know this address, and that no firewall is in between",
    )


def _alike(hellos: list[dict[str, Any]]) -> None:
    """JAX waits minutes for a process whose backend or version differs, and then names neither."""
    for number, hello in enumerate(hellos):
        if hello["jax"] != hellos[0]["jax"]:
            raise UserError(
                f"JAX is {hellos[0]['jax']} on process 0 ({hellos[0]['host']}) and {hello['jax']} on process "
                f"{number} ({hello['host']})",
                fix="run the same image or environment on every host",
            )
    without = [f"{number} ({hello['host']})" for number, hello in enumerate(hellos) if not hello["gpus"]]
    if without and len(without) < len(hellos):
        raise UserError(
            f"process {', '.join(without)} sees no GPU, and the others do",
            fix="check nvidia-smi or rocm-smi there, and that the launcher asks for GPUs on every node "
            "(Slurm: --gpus-per-node)",
        )


def _initialize(place: Place, address: str, devices: list[int] | None, timeout: float) -> None:
    host = address.rpartition(":")[0].strip("[]")
    if any(name.lower() in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy") for name in os.environ):
        for name in ("no_proxy", "NO_PROXY"):  # gRPC would send even a neighbour's address through a proxy
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), host)))
    jax.config.update("jax_check_proxy_envs", False)
    # It would take SIGTERM for itself, and nothing here asks it.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator_address=address,
        num_processes=place.processes,
        process_id=place.process,
        local_device_ids=devices,
        cluster_detection_method="deactivate",
        initialization_timeout=max(10, int(timeout)),
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _names(processes: list[int]) -> str:
    shown = ", ".join(map(str, processes[:16]))
    more = f" and {len(processes) - 16} more" if len(processes) > 16 else ""
    return f"process{'es' if len(processes) > 1 else ''} {shown}{more}"


def _seconds(name: str, default: float) -> float:
    words = os.environ.get(name)
    try:
        return float(words) if words else default
    except ValueError:
        raise UserError(f"{name} is '{words}', which is not a number of seconds", where="environment") from None
