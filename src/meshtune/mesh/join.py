"""Joins one of several processes to its job: finds the coordinator, checks the others, initialises jax.distributed."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping

import jax

from meshtune.errors import UserError
from meshtune.mesh import faults
from meshtune.mesh.client import Client
from meshtune.mesh.coordinator import Coordinator, find_second_coordinator
from meshtune.mesh.rendezvous import ProcessInfo

START_TIMEOUT = 300.0  # seconds for all processes to connect; MESHTUNE_START_TIMEOUT overrides it


def join(
    info: ProcessInfo, gpus: int, device_ids: list[int] | None, timeout: float | None = None
) -> tuple[Client, Coordinator | None]:
    """Connects to the other processes and initialises JAX for the devices of all; process 0 has the coordinator.

    `gpus` are those of this machine, `device_ids` the ones of this process. Raises UserError as `processes.start` does.
    """
    timeout = timeout or _seconds("MESHTUNE_START_TIMEOUT", START_TIMEOUT)
    started = time.monotonic()
    host, port = info.address
    coordinator = Coordinator(info) if info.process_index == 0 else None
    client = Client(info, coordinator.address if coordinator else (host, port), timeout)
    if coordinator is not None and (second := find_second_coordinator(info, coordinator.identity)):
        raise UserError(
            f"two processes have the index 0: one on {socket.gethostname()}, and one at {second}",
            where=f"launched by {info.launcher}",
            fix="give every process its own index (MESHTUNE_PROCESS), counted from 0",
        )
    jax_port = _free_port() if coordinator is not None else None
    hello = {"host": client.host, "jax": jax.__version__, "port": jax_port, "gpus": gpus}
    hellos = _gather_hellos(coordinator, client, hello, timeout - (time.monotonic() - started))
    _check_same_environment(hellos)
    faults.exit_on_job_end(client, _wait_for_others(coordinator))
    bound = coordinator.bound_host if coordinator is not None else None
    bind_address = bound and (f"[{bound}]:{jax_port}" if ":" in bound else f"{bound}:{jax_port}")
    _initialize_jax(info, f"{host}:{hellos[0]['port']}", device_ids, timeout, bind_address)
    return client, coordinator


def _wait_for_others(coordinator: Coordinator | None) -> Callable[[], None]:
    return coordinator.close if coordinator is not None else lambda: None


def _gather_hellos(
    coordinator: Coordinator | None, client: Client, hello: Mapping[str, object], timeout: float
) -> list[dict[str, object]]:
    if coordinator is None:
        # Longer than the coordinator's own timeout, so that it can first report which processes are missing.
        return client.exchange("start", hello, timeout + 10)
    try:
        return client.exchange("start", hello, timeout)
    except UserError as error:
        reason = _missing_processes(coordinator, client, timeout) or error
    coordinator.end(faults.job_end_of(client, reason, cause="start"))
    raise reason


def _missing_processes(coordinator: Coordinator, client: Client, timeout: float) -> UserError | None:
    missing, info = coordinator.missing(), client.info
    if not missing or client.job_end is not None:
        return None
    return UserError(
        f"{_names(missing)} of {info.process_count} did not connect to {info.coordinator} within {timeout:.0f} s",
        where=f"process 0 on {client.host}",
        fix="check that they were launched, that they know this address, and that no firewall is in between",
    )


def _check_same_environment(hellos: list[dict[str, object]]) -> None:
    """Checked here because JAX waits minutes for a process whose version or backend differs, and then names neither."""
    for index, hello in enumerate(hellos):
        if hello["jax"] != hellos[0]["jax"]:
            raise UserError(
                f"JAX is {hellos[0]['jax']} on process 0 ({hellos[0]['host']}) and {hello['jax']} on process "
                f"{index} ({hello['host']})",
                fix="run the same image or environment on every host",
            )
    without_gpu = [f"{index} ({hello['host']})" for index, hello in enumerate(hellos) if not hello["gpus"]]
    if without_gpu and len(without_gpu) < len(hellos):
        raise UserError(
            f"process {', '.join(without_gpu)} sees no GPU, and the others do",
            fix="check nvidia-smi or rocm-smi there, and that the launcher asks for GPUs on every node "
            "(Slurm: --gpus-per-node)",
        )


def _initialize_jax(
    info: ProcessInfo, address: str, device_ids: list[int] | None, timeout: float, bind_address: str | None
) -> None:
    host = address.rpartition(":")[0].strip("[]")
    if any(name.lower() in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy") for name in os.environ):
        for name in ("no_proxy", "NO_PROXY"):  # gRPC would connect even to a neighbour through a proxy
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), host)))
    jax.config.update("jax_check_proxy_envs", False)
    # JAX's preemption service would install its own SIGTERM handler; train.interrupt has ours.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator_address=address,
        coordinator_bind_address=bind_address,
        num_processes=info.process_count,
        process_id=info.process_index,
        local_device_ids=device_ids,
        cluster_detection_method="deactivate",
        initialization_timeout=max(10, int(timeout)),
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _names(processes: list[int]) -> str:
    shown = ", ".join(map(str, processes[:16]))
    omitted = f" and {len(processes) - 16} more" if len(processes) > 16 else ""
    return f"process{'es' if len(processes) > 1 else ''} {shown}{omitted}"


def _seconds(name: str, default: float) -> float:
    value = os.environ.get(name)
    try:
        return float(value) if value else default
    except ValueError:
        raise UserError(f"{name} is '{value}', which is not a number of seconds", where="environment") from None
