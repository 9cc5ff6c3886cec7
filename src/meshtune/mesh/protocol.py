"""The message protocol between the processes of a job: JSON objects, one a line, over TCP.

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
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

from meshtune.errors import UserError

HEARTBEAT_INTERVAL = 5.0  # seconds
SILENCE_TIMEOUT = 40.0  # seconds without a message after which a process counts as lost
MAX_MESSAGE_BYTES = 1 << 26
MAX_HELLO_BYTES = 1 << 14  # of a connection that has not yet proved that it is a process of this job
HELLO_TIMEOUT = 10.0  # seconds that it has for that
PROTOCOL_VERSION = "meshtune-3"
EXIT_PROCESS_LOST = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong with the run, the same command resumes it

Message = dict[str, Any]  # JSON; "type" says which of its other keys are present


@dataclasses.dataclass(frozen=True)
class JobEnd:
    """Why a job ends. `cause` is "start" (it cannot begin), "lost" (a process is gone) or "failed" (a process raised).

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


def send(connection: socket.socket, lock: threading.Lock, message: Message) -> bool:
    """Sends one message. False if the connection is closed: the thread that reads from it reports the loss."""
    try:
        with lock:
            connection.sendall(json.dumps(message).encode() + b"\n")
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
