"""Reads from the launcher's environment variables which process of the job this is, and the coordinator's address.

Every launcher has its own variables. JAX reads some of them too, but it ties a Slurm or Open MPI process to a single
device of its node, and needs a package and permissions to query Kubernetes; so all of them are read here.
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
JAX_PROCESSES, JAX_PROCESS = "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
SLICE, SLICES = "MESHTUNE_SLICE", "MESHTUNE_SLICES"  # of pods, whose index counts from 0 in each slice
LOCAL_DEVICES, JOB, SECRET = "MESHTUNE_LOCAL_DEVICES", "MESHTUNE_JOB", "MESHTUNE_SECRET"
PORT = 61400  # the default: above the ephemeral ports that operating systems assign
FIRST_PORT, PORTS = 61440, 4096  # for jobs that share nodes: the port is chosen by the job's number

Environment = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class ProcessInfo:
    """Process `process_index` of `process_count`. Process 0 listens at `coordinator` (host:port).

    `launcher` is who launched the processes. `local_index` of `local_count` counts the processes of this host, where
    that is known. `local_devices` is how many of the visible GPUs this process uses, if that is not an even share.
    `devices_isolated` says that the launcher shows each process only its own devices, so that none have to be divided.
    `job` is the launcher's name of the job: processes of another job are rejected. `secret` is known only to the
    processes of this job; without one nobody has to prove that he belongs to it.
    """

    process_index: int = 0
    process_count: int = 1
    coordinator: str | None = None
    launcher: str = "none"
    local_index: int = 0
    local_count: int = 1
    local_devices: int | None = None
    devices_isolated: bool = False
    job: str = ""
    secret: str = dataclasses.field(default="", repr=False)

    @property
    def address(self) -> tuple[str, int]:
        """(host, port) of the coordinator. Raises: UserError if `coordinator` is not of the form host:port."""
        host, _, port = (self.coordinator or "").rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise UserError(
                f"the coordinator's address '{self.coordinator}' is not HOST:PORT",
                where=f"environment, {self.launcher}",
                fix=f"set {COORDINATOR}=host:port, the same for every process",
            )
        return host.strip("[]"), int(port)


def detect_process_info(env: Environment = os.environ) -> ProcessInfo:
    """This process's index, count and coordinator; process 0 of 1 if no launcher is recognised.

    MESHTUNE_COORDINATOR, MESHTUNE_PROCESSES and MESHTUNE_PROCESS take precedence; with the variables of a known
    launcher, only MESHTUNE_COORDINATOR replaces the address they give. Raises: UserError for variables that are
    missing, are not numbers, or contradict each other.
    """
    info = next((info for detect in LAUNCHERS if (info := detect(env)) is not None), ProcessInfo())
    if info.process_count > 1 and (address := env.get(COORDINATOR)):
        info = dataclasses.replace(info, coordinator=address)
    if secret := env.get(SECRET):
        info = dataclasses.replace(info, secret=secret)
    if info.process_count < 1 or not 0 <= info.process_index < max(1, info.process_count):
        raise UserError(
            f"process {info.process_index} of {info.process_count} is impossible: indices run from 0 to the count less "
            "one",
            where=f"environment, {info.launcher}",
            fix="correct the variables that the launcher sets",
        )
    if info.process_count > 1:
        _ = info.address  # a malformed address is an error now, not after minutes of retries
    return info


def _from_meshtune(env: Environment) -> ProcessInfo | None:
    if PROCESSES not in env and PROCESS not in env:
        return None
    count = _integer(env, PROCESSES)
    devices = _integer(env, LOCAL_DEVICES) if LOCAL_DEVICES in env else None
    if count <= 1 and PROCESS not in env:
        return ProcessInfo(launcher="Meshtune", local_devices=devices)
    if PROCESS not in env and "JOB_COMPLETION_INDEX" in env:
        per_slice = max(1, count // _integer(env, SLICES, 1))
        index = _integer(env, SLICE, 0) * per_slice + _integer(env, "JOB_COMPLETION_INDEX")
    else:
        index = _integer(env, PROCESS)
    if count > 1:
        _require(env, COORDINATOR)
    local_index, local_count = _integer(env, LOCAL_PROCESS, 0), _integer(env, LOCAL_PROCESSES, 1)
    return ProcessInfo(
        index, count, env.get(COORDINATOR), "Meshtune", local_index, local_count, devices, job=env.get(JOB, "")
    )


def _from_slurm(env: Environment) -> ProcessInfo | None:
    # Only srun sets a step's variables: the batch script has the job's, and is not one of its processes.
    if "SLURM_STEP_NODELIST" not in env or "SLURM_PROCID" not in env:
        return None
    count = _integer(env, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS")
    if count <= 1:
        return ProcessInfo(launcher="Slurm")
    job = _integer(env, "SLURM_JOB_ID")
    index, local_index = _integer(env, "SLURM_PROCID"), _integer(env, "SLURM_LOCALID")
    node = _integer(env, "SLURM_NODEID", 0)
    per_node = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", str(count)))
    host = first_host(env["SLURM_STEP_NODELIST"])
    if "SLURM_LAUNCH_NODE_IPADDR" in env and not _resolves(host):
        host = env["SLURM_LAUNCH_NODE_IPADDR"]  # the node of the batch script, which is also that of process 0
    port = FIRST_PORT + (job + 17 * _integer(env, "SLURM_STEP_ID", 0)) % PORTS
    return ProcessInfo(
        index,
        count,
        f"{host}:{port}",
        "Slurm",
        local_index,
        per_node[node] if node < len(per_node) else 1,
        devices_isolated=any(name in env for name in ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK")),
        job=str(job),
    )


def _from_open_mpi(env: Environment) -> ProcessInfo | None:
    if "OMPI_COMM_WORLD_SIZE" not in env:
        return None
    count = _integer(env, "OMPI_COMM_WORLD_SIZE")
    if count <= 1:
        return ProcessInfo(launcher="Open MPI")
    # 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911: the job's number, then the addresses of the host of mpirun.
    uri = env.get("OMPI_MCA_orte_hnp_uri", "")
    match = re.match(r"(\d+)\.\d+;(?:tcp://([^,:]+)|tcp6://\[([^,\]]+))", uri)
    job, address = (int(match[1]) // 4096, match[2] or match[3]) if match else (0, "")
    if not address:
        _require(env, COORDINATOR, because="this Open MPI does not say where mpirun runs")
    return ProcessInfo(
        _integer(env, "OMPI_COMM_WORLD_RANK"),
        count,
        f"{address}:{FIRST_PORT + job % PORTS}",
        "Open MPI",
        _integer(env, "OMPI_COMM_WORLD_LOCAL_RANK", 0),
        _integer(env, "OMPI_COMM_WORLD_LOCAL_SIZE", 1),
        job=str(job),
    )


def _from_skypilot(env: Environment) -> ProcessInfo | None:
    if "SKYPILOT_NODE_RANK" not in env:
        return None
    hosts = env.get("SKYPILOT_NODE_IPS", "").split()
    if len(hosts) <= 1:
        return ProcessInfo(launcher="SkyPilot")
    return ProcessInfo(_integer(env, "SKYPILOT_NODE_RANK"), len(hosts), f"{hosts[0]}:{PORT}", "SkyPilot")


def _from_tpu_workers(env: Environment) -> ProcessInfo | None:
    hosts = [host for host in env.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
    if len(hosts) <= 1:
        return None
    index = _integer(env, "TPU_WORKER_ID")
    return ProcessInfo(index, len(hosts), f"{hosts[0]}:{PORT}", "TPU workers", devices_isolated=True)


def _from_kubeflow(env: Environment) -> ProcessInfo | None:
    if not {"COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID"} <= set(env):
        return None
    address, port = env["COORDINATOR_ADDRESS"], env.get("COORDINATOR_PORT", str(PORT))
    return ProcessInfo(_integer(env, "PROCESS_ID"), _integer(env, "NUM_PROCESSES"), f"{address}:{port}", "Kubeflow")


def _from_jax_variables(env: Environment) -> ProcessInfo | None:
    """Reads the variables of jax.distributed, which Kubeflow Trainer v2 and Iris set."""
    if JAX_PROCESSES not in env and JAX_PROCESS not in env:
        return None
    because = "JAX_NUM_PROCESSES, JAX_PROCESS_ID and JAX_COORDINATOR_ADDRESS belong together"
    for name in (JAX_PROCESSES, JAX_PROCESS):
        _require(env, name, because)
    index, count = _integer(env, JAX_PROCESS), _integer(env, JAX_PROCESSES)
    if count <= 1:
        return ProcessInfo(index, count, launcher="JAX variables")
    address = env.get(COORDINATOR) or _require(env, "JAX_COORDINATOR_ADDRESS", because)
    return ProcessInfo(index, count, address, "JAX variables")


def _from_kubernetes(env: Environment) -> ProcessInfo | None:
    if "KUBERNETES_SERVICE_HOST" not in env or "JOB_COMPLETION_INDEX" not in env:
        return None
    # A pod does not know how many pods there are; assuming 1 would train that many copies side by side.
    _require(
        env, PROCESSES, because="a pod of an indexed Job does not know how many there are (set 1 for a single pod)"
    )
    return None


LAUNCHERS: tuple[Callable[[Environment], ProcessInfo | None], ...] = (
    _from_meshtune,
    _from_slurm,
    _from_open_mpi,
    _from_skypilot,
    _from_kubeflow,
    _from_jax_variables,
    _from_tpu_workers,
    _from_kubernetes,
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


def tasks_per_node(text: str) -> list[int]:
    """Slurm's number of tasks on each node: '2(x3),1' -> [2, 2, 2, 1]."""
    counts: list[int] = []
    for count, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(repeats or 1)
    return counts


def _integer(env: Environment, name: str, default: int | None = None) -> int:
    if default is not None and name not in env:
        return default
    value = _require(env, name)
    if not re.fullmatch(r"\d+", value.strip()):
        raise UserError(
            f"{name} is '{value}', which is not a number", where="environment", fix=f"set {name} to a whole number"
        )
    return int(value)


def _require(env: Environment, name: str, because: str = "") -> str:
    if name not in env:
        present = [variable for variable in (COORDINATOR, PROCESSES, PROCESS) if variable in env]
        because = because or f"{' and '.join(present) or 'the launcher'} says that there are several processes"
        raise UserError(f"{name} is not set; {because}", where="environment", fix=f"set {name} for every process")
    return env[name]
