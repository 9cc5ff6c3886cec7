"""Which process of how many this one is, and where it meets the others: read from what launched it.

Every launcher says it in its own variables. JAX reads some of them too, but ties a Slurm or Open MPI process to one
device of its node, and needs a package and rights to ask Kubernetes; so they are read here, in one table.
"""

from __future__ import annotations

import dataclasses
import os
import re
import socket
from collections.abc import Callable, Mapping

from meshtune.errors import UserError

COORDINATOR, PROCESSES, PROCESS = "MESHTUNE_COORDINATOR", "MESHTUNE_PROCESSES", "MESHTUNE_PROCESS"
LOCAL_PROCESS, LOCAL_PROCESSES = "MESHTUNE_LOCAL_PROCESS", "MESHTUNE_LOCAL_PROCESSES"
LOCAL_DEVICES, JOB = "MESHTUNE_LOCAL_DEVICES", "MESHTUNE_JOB"
PORT = 61400  # where nothing says otherwise: above what systems hand out by themselves
FIRST_PORT, PORTS = 61440, 4096  # ports for jobs that share nodes, by the job's number

Environment = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Place:
    """Process `process` of `processes`; they meet at `coordinator` (host:port), where process 0 listens.

    `launcher` said so. `local_process` of `local_processes` is its place on its own host where that is known.
    `local_devices`: it drives that many of the GPUs it sees, not an even share. `own_devices`: the launcher shows
    every process the devices that are its own, so there is nothing to divide.
    `job` is the launcher's name of the job: processes of another job are turned away.
    """

    process: int = 0
    processes: int = 1
    coordinator: str | None = None
    launcher: str = "none"
    local_process: int = 0
    local_processes: int = 1
    local_devices: int | None = None
    own_devices: bool = False
    job: str = ""

    @property
    def address(self) -> tuple[str, int]:
        """(host, port) of the coordinator. Raises UserError where it is not host:port."""
        host, _, port = (self.coordinator or "").rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise UserError(
                f"the coordinator's address '{self.coordinator}' is not HOST:PORT",
                where=f"environment, {self.launcher}",
                fix=f"set {COORDINATOR}=host:port, the same for every process",
            )
        return host.strip("[]"), int(port)


def find_place(env: Environment = os.environ) -> Place:
    """This process's place in its job; a process that nothing launched is the only one.

    MESHTUNE_COORDINATOR, MESHTUNE_PROCESSES and MESHTUNE_PROCESS come first; with a launcher that is known,
    MESHTUNE_COORDINATOR alone replaces the address it gives.
    Raises: UserError for variables that are missing, are no numbers, or do not fit each other.
    """
    place = next((found for read in LAUNCHERS if (found := read(env)) is not None), Place())
    if place.processes > 1 and (given := env.get(COORDINATOR)):
        place = dataclasses.replace(place, coordinator=given)
    if place.processes < 1 or not 0 <= place.process < max(1, place.processes):
        raise UserError(
            f"process {place.process} of {place.processes} cannot be: processes count from 0 to the number less one",
            where=f"environment, {place.launcher}",
            fix="correct what launches the processes",
        )
    if place.processes > 1:
        _ = place.address  # a bad address is an error at once, not after minutes of trying
    return place


def _own(env: Environment) -> Place | None:
    if PROCESSES not in env and PROCESS not in env:
        return None
    count = _number(env, PROCESSES)
    devices = _number(env, LOCAL_DEVICES) if LOCAL_DEVICES in env else None
    if count <= 1 and PROCESS not in env:
        return Place(launcher="Meshtune", local_devices=devices)
    if PROCESS not in env and "JOB_COMPLETION_INDEX" in env:
        process = _number(env, "JOB_COMPLETION_INDEX")
    else:
        process = _number(env, PROCESS)
    if count > 1:
        _needed(env, COORDINATOR)
    local, locals_ = _number(env, LOCAL_PROCESS, 0), _number(env, LOCAL_PROCESSES, 1)
    return Place(process, count, env.get(COORDINATOR), "Meshtune", local, locals_, devices, job=env.get(JOB, ""))


def _slurm(env: Environment) -> Place | None:
    # A step's variables, which srun alone sets: the batch script itself has the job's and is no process of it.
    if "SLURM_STEP_NODELIST" not in env or "SLURM_PROCID" not in env:
        return None
    count = _number(env, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS")
    if count <= 1:
        return Place(launcher="Slurm")
    job = _number(env, "SLURM_JOB_ID")
    process, local = _number(env, "SLURM_PROCID"), _number(env, "SLURM_LOCALID")
    node = _number(env, "SLURM_NODEID", 0)
    per_node = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", str(count)))
    host = first_host(env["SLURM_STEP_NODELIST"])
    if "SLURM_LAUNCH_NODE_IPADDR" in env and not _resolves(host):
        host = env["SLURM_LAUNCH_NODE_IPADDR"]  # of a batch script: its first node, where process 0 is
    port = FIRST_PORT + (job + 17 * _number(env, "SLURM_STEP_ID", 0)) % PORTS
    return Place(
        process,
        count,
        f"{host}:{port}",
        "Slurm",
        local,
        per_node[node] if node < len(per_node) else 1,
        own_devices=any(name in env for name in ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK")),
        job=str(job),
    )


def _open_mpi(env: Environment) -> Place | None:
    if "OMPI_COMM_WORLD_SIZE" not in env:
        return None
    count = _number(env, "OMPI_COMM_WORLD_SIZE")
    if count <= 1:
        return Place(launcher="Open MPI")
    # 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911: the job's number, and the addresses of the host of mpirun.
    uri = env.get("OMPI_MCA_orte_hnp_uri", "")
    found = re.match(r"(\d+)\.\d+;(?:tcp://([^,:]+)|tcp6://\[([^,\]]+))", uri)
    number, address = (int(found[1]) // 4096, found[2] or found[3]) if found else (0, "")
    if not address:
        _needed(env, COORDINATOR, because="this Open MPI does not tell where mpirun runs")
    return Place(
        _number(env, "OMPI_COMM_WORLD_RANK"),
        count,
        f"{address}:{FIRST_PORT + number % PORTS}",
        "Open MPI",
        _number(env, "OMPI_COMM_WORLD_LOCAL_RANK", 0),
        _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", 1),
        job=str(number),
    )


def _skypilot(env: Environment) -> Place | None:
    if "SKYPILOT_NODE_RANK" not in env:
        return None
    hosts = env.get("SKYPILOT_NODE_IPS", "").split()
    if len(hosts) <= 1:
        return Place(launcher="SkyPilot")
    return Place(_number(env, "SKYPILOT_NODE_RANK"), len(hosts), f"{hosts[0]}:{PORT}", "SkyPilot")


def _tpu_workers(env: Environment) -> Place | None:
    hosts = [host for host in env.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
    if len(hosts) <= 1:
        return None
    return Place(_number(env, "TPU_WORKER_ID"), len(hosts), f"{hosts[0]}:{PORT}", "TPU workers", own_devices=True)


def _kubeflow(env: Environment) -> Place | None:
    if not {"COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID"} <= set(env):
        return None
    address, port = env["COORDINATOR_ADDRESS"], env.get("COORDINATOR_PORT", str(PORT))
    return Place(_number(env, "PROCESS_ID"), _number(env, "NUM_PROCESSES"), f"{address}:{port}", "Kubeflow")


def _kubernetes(env: Environment) -> Place | None:
    if "KUBERNETES_SERVICE_HOST" not in env or "JOB_COMPLETION_INDEX" not in env:
        return None
    # A pod is not told how many it is one of; to guess 1 would train that many copies side by side.
    _needed(env, PROCESSES, because="a pod of an indexed Job is not told how many there are (1 for one alone)")
    return None


LAUNCHERS: tuple[Callable[[Environment], Place | None], ...] = (
    _own,
    _slurm,
    _open_mpi,
    _skypilot,
    _kubeflow,
    _tpu_workers,
    _kubernetes,
)


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: 'node[007-015],b' -> 'node007'."""
    match = re.match(r"([^,\[]+)(?:\[([^,\-\]]+)[^\]]*\]([^,]*))?", nodes.strip())
    if not match:
        raise UserError(f"'{nodes}' is not a list of Slurm nodes", where="SLURM_STEP_NODELIST")
    return f"{match[1]}{match[2] or ''}{match[3] or ''}"


def _resolves(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def tasks_per_node(words: str) -> list[int]:
    """Slurm's counts of tasks, node by node: '2(x3),1' -> [2, 2, 2, 1]."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", words):
        counts += [int(count)] * int(times or 1)
    return counts


def _number(env: Environment, name: str, default: int | None = None) -> int:
    if default is not None and name not in env:
        return default
    value = _needed(env, name)
    if not re.fullmatch(r"\d+", value.strip()):
        raise UserError(f"{name} is '{value}', which is not a number", where="environment", fix=f"set {name} to one")
    return int(value)


def _needed(env: Environment, name: str, because: str = "") -> str:
    if name not in env:
        given = [one for one in (COORDINATOR, PROCESSES, PROCESS) if one in env]
        because = because or f"{' and '.join(given) or 'the launcher'} says this is one of several processes"
        raise UserError(f"{name} is not set; {because}", where="environment", fix=f"set {name} for every process")
    return env[name]
