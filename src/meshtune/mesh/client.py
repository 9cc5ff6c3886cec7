"""The connection of a process to the coordinator and its messages.

The connections form a star. Process 0 runs the coordinator (mesh.coordinator), and every process, process 0 included,
is a client of it (mesh.client). The coordinator sees the connection of a process that dies close at once; a host that
goes down is noticed by its missing heartbeats.

JAX's own coordination service is not enough: it aborts the surviving processes after minutes with a message that names
a task number, its key-value store is not public API, and it cannot report that versions of JAX differ.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import itertools
import json
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from meshtune.errors import UserError
from meshtune.mesh.rendezvous import COORDINATOR, SECRET, ProcessInfo

HEARTBEAT_INTERVAL = 5.0  # seconds
SILENCE_TIMEOUT = 40.0  # seconds without a message after which a process counts as lost
MAX_MESSAGE_BYTES = 1 << 26
MAX_HELLO_BYTES = 1 << 14  # of a connection that has not yet proved that it is a process of this job
HELLO_TIMEOUT = 10.0  # seconds that it has for that
PROTOCOL_VERSION = "meshtune-4"
STALLED = "stalled"  # the cause of a job that lives and does not go on
EXIT_PROCESS_LOST = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong with the run, the same command resumes it

Message = dict[str, Any]  # JSON; "type" says which of its other keys are present


@dataclasses.dataclass(frozen=True)
class JobEnd:
    """Why a job ends. `cause` is "start" (it cannot begin), "lost" (a process is gone), STALLED or "failed" (a process
    raised).

    `process_index` and `host` name the process that caused it; `message`, `where` and `fix` are those of a UserError.
    """

    cause: str
    message: str
    process_index: int | None = None
    host: str = ""
    where: str | None = None
    fix: str | None = None
    exit_code: int = 1

    def to_error(self) -> UserError:
        return UserError(self.message, where=self.where, fix=self.fix)


def process_lost(process_index: int, process_count: int, host: str, reason: str) -> JobEnd:
    """The JobEnd for a process that died or fell silent."""
    return JobEnd(
        "lost",
        f"process {process_index} of {process_count} on {host} was lost: {reason}",
        process_index=process_index,
        host=host,
        fix="a run continues from its last checkpoint with resume=true; a server is started again",
        exit_code=EXIT_PROCESS_LOST,
    )


def configure_socket(connection: socket.socket) -> None:
    """Sends small messages without delay (TCP_NODELAY) and turns TCP keep-alive on."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def encode(message: Message) -> bytes:
    """A message as a line of JSON."""
    return json.dumps(message).encode() + b"\n"


def send(connection: socket.socket, lock: threading.Lock, message: Message | bytes) -> bool:
    """Sends one message, encoded or not. False if the connection is closed: the thread that reads from it reports the
    loss."""
    try:
        with lock:
            connection.sendall(message if isinstance(message, bytes) else encode(message))
    except OSError:
        return False
    return True


def proof(secret: str, role: str, nonce: str, hello: Message) -> str:
    """The HMAC of a greeting, which only a process that knows the job's secret can make; `role` is whose it is."""
    greeting = json.dumps([role, nonce, hello], sort_keys=True)
    return hmac.new(secret.encode(), greeting.encode(), hashlib.sha256).hexdigest()


def receive_messages(connection: socket.socket, first_bytes: int = MAX_MESSAGE_BYTES) -> Iterator[Message]:
    """Complete messages, until the connection closes, times out, or sends bytes that are not of this protocol; the
    first may have `first_bytes`."""
    buffer, limit = b"", first_bytes
    while True:
        try:
            received = connection.recv(1 << 16)
        except OSError:
            return
        buffer += received
        if not received or len(buffer) > limit:
            return
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                return
            if not isinstance(message, dict) or "type" not in message:
                return
            yield message
            limit = MAX_MESSAGE_BYTES


class Client:
    """One process's connection to the coordinator.

    When the job ends, `on_end` is called in a background thread with the reason. Before `on_end` is set, and while the
    main thread waits in `reduce`, the reason is raised by `reduce` instead.
    """

    def __init__(self, info: ProcessInfo, address: tuple[str, int], timeout: float):
        self.info, self.host = info, socket.gethostname()
        self.on_end: Callable[[JobEnd], None] | None = None
        self.job_end: JobEnd | None = None
        self.ended = threading.Event()
        self.leaving = False
        self.steps = 0  # of its loop that the main thread has taken, for the coordinator
        self._lock, self._received = threading.Lock(), queue.Queue[Message]()
        self._waiting = False
        self._connection, self._messages = join(info, address, timeout)
        threading.Thread(target=self._receive, name="meshtune-client", daemon=True).start()
        threading.Thread(target=self._send_heartbeats, name="meshtune-heartbeat", daemon=True).start()

    def reduce(self, reduction: str, tag: str, value: object, timeout: float) -> Any:
        """Reduces the `value` (JSON) of every process, once all have called with the same `tag` and `reduction`.

        Returns this process's result of one of mesh.reductions. Raises: UserError if the job ends meanwhile, or if a
        process has not called within `timeout` seconds.
        """
        self._waiting = threading.current_thread() is threading.main_thread()
        send(self._connection, self._lock, {"type": "put", "reduction": reduction, "tag": tag, "value": value})
        try:
            while True:
                message = self._received.get(timeout=timeout)
                if message["type"] == "end":
                    assert self.job_end is not None
                    raise self.job_end.to_error()
                if message["tag"] == tag:
                    return message["result"]
        except queue.Empty:
            raise UserError(
                f"not every process reached '{tag}' within {timeout:.0f} s",
                where=f"process {self.info.process_index} of {self.info.process_count} on {self.host}",
                fix="look at the logs of the processes that are late",
            ) from None
        finally:
            self._waiting = False

    def report_failure(self, job_end: JobEnd) -> None:
        """Ends the job for every process; returns once the coordinator has passed the reason on."""
        self.leaving = True
        message = {"type": "failed", "job_end": dataclasses.asdict(job_end)}
        if self.job_end is None and send(self._connection, self._lock, message):
            self.ended.wait(5.0)
        self.close()

    def close(self) -> None:
        """Leaves the job: whatever happens to it afterwards no longer ends this process."""
        self.leaving = True
        send(self._connection, self._lock, {"type": "goodbye"})

    def _receive(self) -> None:
        self._connection.settimeout(SILENCE_TIMEOUT)
        for message in self._messages:
            if message["type"] == "result":
                self._received.put(message)
            elif message["type"] == "end":
                self._end(JobEnd(**message["job_end"]))
                return
        host, _ = self.info.address
        reason = "its connection closed or fell silent: it was killed, crashed, or its host went down"
        self._end(process_lost(0, self.info.process_count, host, reason))

    def _end(self, job_end: JobEnd) -> None:
        self.job_end = job_end
        self.ended.set()
        self._received.put({"type": "end"})
        if self.on_end is not None and not self.leaving and not self._waiting:
            self.on_end(job_end)

    def _send_heartbeats(self) -> None:
        while not self.leaving and not self.ended.is_set():
            time.sleep(HEARTBEAT_INTERVAL)
            send(self._connection, self._lock, {"type": "heartbeat", "steps": self.steps})


def join(info: ProcessInfo, address: tuple[str, int], timeout: float) -> tuple[socket.socket, Iterator[Message]]:
    """Connects to the coordinator and proves that this is a process of the job, retrying for `timeout` seconds; returns
    the connection and what it receives.

    Raises: UserError if the coordinator cannot be reached, or does not know the job's secret.
    """
    started, pause, reason = time.monotonic(), 0.1, "no attempt was made"
    while True:
        remaining = timeout - (time.monotonic() - started)
        if remaining <= 0:
            break
        try:
            connection = socket.create_connection(address, timeout=min(10.0, remaining))
            configure_socket(connection)
            messages = _greet(info, connection)
            if messages is not None:
                return connection, messages
            connection.close()
            reason = "what answers there is no coordinator of this version of Meshtune"
        except OSError as error:
            reason = error.strerror or str(error)
        time.sleep(max(0.0, min(pause, timeout - (time.monotonic() - started))))
        pause = min(2.0, pause * 1.5)
    host, port = address
    raise UserError(
        f"process {info.process_index} of {info.process_count} could not reach the coordinator at {host}:{port} in "
        f"{timeout:.0f} s: {reason}",
        where=f"host {socket.gethostname()}, launched by {info.launcher}",
        fix=f"check that process 0 was started on {host}, that this host resolves that name (getent hosts {host}) and "
        f"that no firewall closes port {port} between them; {COORDINATOR}=host:port sets another address",
    )


def _greet(info: ProcessInfo, connection: socket.socket) -> Iterator[Message] | None:
    """Answers the coordinator's challenge; returns the messages that follow, or None where it sends none that is valid.

    Raises: UserError if what answers does not know the job's secret.
    """
    messages = receive_messages(connection)
    challenge = next(messages, None)
    if not challenge or challenge["type"] != "challenge" or challenge.get("version") != PROTOCOL_VERSION:
        return None
    # The process count is sent so that the coordinator can compare it with its own.
    hello: Message = {
        "type": "hello",
        "version": PROTOCOL_VERSION,
        "process_index": info.process_index,
        "process_count": info.process_count,
        "job": info.job,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "nonce": secrets.token_hex(16),
    }
    signed = hello | {"proof": proof(info.secret, "client", str(challenge.get("nonce")), hello)}
    if not send(connection, threading.Lock(), signed):
        return None
    answer = next(messages, None)
    if answer is None:
        return None
    if answer["type"] == "welcome":
        expected = proof(info.secret, "coordinator", hello["nonce"], {})
        if not hmac.compare_digest(str(answer.get("proof")), expected):
            raise UserError(
                f"what answers at {info.coordinator} is no process of this job: it does not know the job's secret",
                where=f"process {info.process_index} of {info.process_count} on {socket.gethostname()}",
                fix=f"give every process the same {SECRET}, or another port",
            )
        return messages
    return itertools.chain([answer], messages)
