"""Joins one of several processes to its job, and ends it when another fails.

Exit codes: 75 (EX_TEMPFAIL) another process was lost or did not come in time, and the same command resumes the run; 2 a
mistake of the user; 1 a defect, on this process or on the one that the message names.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping

import jax

from meshtune.errors import UserError
from meshtune.mesh.client import EXIT_PROCESS_LOST, STALLED, Client, JobEnd
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
    port = _start(coordinator, client, hello, timeout - (time.monotonic() - started))
    exit_on_job_end(client, _wait_for_others(coordinator))
    bound = coordinator.bound_host if coordinator is not None else None
    bind_address = bound and (f"[{bound}]:{jax_port}" if ":" in bound else f"{bound}:{jax_port}")
    _initialize_jax(info, f"{host}:{port}", device_ids, timeout, bind_address)
    return client, coordinator


def _wait_for_others(coordinator: Coordinator | None) -> Callable[[], None]:
    return coordinator.close if coordinator is not None else lambda: None


def _start(coordinator: Coordinator | None, client: Client, hello: Mapping[str, object], timeout: float) -> int:
    """Waits for all processes, and returns the port of JAX's own service. Process 0 compares the hellos."""
    if coordinator is None:
        # Longer than the coordinator's own timeout, so that it can first report which processes are missing.
        client.reduce("gather", "start", hello, timeout + 10)
        return client.reduce("first", "port", None, timeout + 10)[1]
    try:
        _check_same_environment(client.reduce("gather", "start", hello, timeout))
        return client.reduce("first", "port", hello["port"], timeout)[1]
    except UserError as error:
        reason = _missing_processes(coordinator, client, timeout) or error
    coordinator.end(job_end_of(client, reason, cause="start"))
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


MAIN_THREAD_GRACE = 1.0  # seconds in which the main thread may end by itself, with its own message
REASON_TIMEOUT = 3.0  # seconds to wait for the reason after a collective operation failed
GLOO = re.compile(r"\bGloo\b|cpu:gloo")  # in errors of JAX's collective operations between CPUs
GLOO_SECONDS = (
    30  # that its processes may come apart; JAX sets no other limit (https://github.com/jax-ml/jax/issues/40831)
)

_exiting = threading.Lock()


def exit_on_job_end(client: Client, wait_for_others: Callable[[], None]) -> None:
    """From now on this process exits when the job ends, even while its main thread is blocked.

    For `wait_for_others` see `leave_on_error`.
    """
    client.on_end = lambda job_end: _exit_on_end(client, job_end, wait_for_others)


def leave_on_error(client: Client, error: BaseException, wait_for_others: Callable[[], None]) -> None:
    """Handles `error`, which ends the main thread: reports it to the other processes, or to the user their reason.

    Returns if the error arose on this process, so that it propagates as usual; interpreter shutdown is then cut short,
    because JAX would wait there for processes that have gone. Does not return if another process caused the end.
    `wait_for_others` makes process 0 wait for the others to leave: JAX aborts them as soon as process 0 is gone.
    """
    if not isinstance(error, UserError | KeyboardInterrupt | SystemExit):
        # A process that dies breaks the pending collective operation, often before its loss is known here.
        client.ended.wait(REASON_TIMEOUT)
    if client.job_end is None and GLOO.search(str(error)):
        client.report_failure(_not_connected(client, error))
        client.job_end = client.job_end or _not_connected(client, error)
    if client.job_end is not None:
        _report_and_exit(client, client.job_end, wait_for_others)
    client.report_failure(job_end_of(client, error))
    wait_for_others()
    atexit.register(_exit, _exit_code(error))


def _not_connected(client: Client, error: BaseException) -> JobEnd:
    """An operation between processes that all live has failed, because they began it further apart than Gloo waits."""
    info = client.info
    return JobEnd(
        "lost",
        f"process {info.process_index} of {info.process_count} on {client.host} waited {GLOO_SECONDS} s for the others "
        f"in an operation that all take part in: {str(error).strip().splitlines()[0]}",
        info.process_index,
        client.host,
        fix="the same command with resume=true continues from the last checkpoint; where it happens again, start fewer "
        "processes on each machine, or leave it other work: JAX's Gloo, which joins CPUs, has no longer limit",
        exit_code=EXIT_PROCESS_LOST,
    )


def job_end_of(client: Client, error: BaseException, cause: str = "failed") -> JobEnd:
    """Converts an `error` of this process to the report that the other processes get."""
    info = client.info
    if isinstance(error, UserError):
        message, where, fix = error.what, error.where, error.fix
    else:
        text = str(error).strip().splitlines()
        message, where, fix = f"{type(error).__name__}{': ' + text[0] if text else ''}", None, "look at its log"
    if cause == "failed":
        message = f"process {info.process_index} of {info.process_count} on {client.host} failed: {message}"
    return JobEnd(cause, message, info.process_index, client.host, where, fix, _exit_code(error))


def _exit_code(error: BaseException) -> int:
    if isinstance(error, UserError):
        return 2
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _exit_on_end(client: Client, job_end: JobEnd, wait_for_others: Callable[[], None]) -> None:
    # JAX aborts this process within a tenth of a second after process 0 is gone, with a message that names no process.
    deadline = time.monotonic() + (0.0 if job_end.cause in ("lost", STALLED) else MAIN_THREAD_GRACE)
    while time.monotonic() < deadline:
        if client.leaving:
            return
        time.sleep(0.02)
    _report_and_exit(client, job_end, wait_for_others)


def _report_and_exit(client: Client, job_end: JobEnd, wait_for_others: Callable[[], None]) -> None:
    if not _exiting.acquire(blocking=False):
        time.sleep(60)  # the other thread is already exiting
    show_cursor = "\x1b[?25h\n" if sys.stderr.isatty() else "\n"  # a progress bar may have hidden the cursor
    lines = [f"error: {job_end.message}", *([f"where: {job_end.where}"] if job_end.where else [])]
    lines += [f"  fix: {job_end.fix}"] if job_end.fix else []
    if job_end.cause == STALLED:
        faulthandler.dump_traceback(2)
    os.write(2, (show_cursor + "\n".join(lines) + "\n").encode())
    client.close()
    wait_for_others()
    _exit(job_end.exit_code or EXIT_PROCESS_LOST)


def _exit(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
