"""A process's connection to the coordinator: exchanges small values and receives the reason a job ends."""

from __future__ import annotations

import dataclasses
import hmac
import itertools
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from meshtune.errors import UserError
from meshtune.mesh.protocol import (
    HEARTBEAT_INTERVAL,
    PROTOCOL_VERSION,
    SILENCE_TIMEOUT,
    JobEnd,
    Message,
    configure_socket,
    process_lost,
    proof,
    receive_messages,
    send,
)
from meshtune.mesh.rendezvous import COORDINATOR, SECRET, ProcessInfo


class Client:
    """One process's connection to the coordinator.

    When the job ends, `on_end` is called in a background thread with the reason. Before `on_end` is set, and while
    `exchange` waits, the reason is raised by `exchange` instead.
    """

    def __init__(self, info: ProcessInfo, address: tuple[str, int], timeout: float):
        self.info, self.host = info, socket.gethostname()
        self.on_end: Callable[[JobEnd], None] | None = None
        self.job_end: JobEnd | None = None
        self.ended = threading.Event()
        self.leaving = False
        self._lock, self._received = threading.Lock(), queue.Queue[Message]()
        self._exchanging = False
        self._connection, self._messages = join(info, address, timeout)
        threading.Thread(target=self._receive, name="meshtune-client", daemon=True).start()
        threading.Thread(target=self._send_heartbeats, name="meshtune-heartbeat", daemon=True).start()

    def exchange(self, tag: str, value: object, timeout: float) -> list[Any]:
        """The `value` (JSON) of every process, in order of process, once all have called with the same `tag`.

        Raises: UserError if the job ends meanwhile, or if a process has not called within `timeout` seconds.
        """
        self._exchanging = True
        send(self._connection, self._lock, {"type": "put", "tag": tag, "value": value})
        try:
            while True:
                message = self._received.get(timeout=timeout)
                if message["type"] == "end":
                    assert self.job_end is not None
                    raise self.job_end.to_error()
                if message["tag"] == tag:
                    return message["values"]
        except queue.Empty:
            raise UserError(
                f"not every process reached '{tag}' within {timeout:.0f} s",
                where=f"process {self.info.process_index} of {self.info.process_count} on {self.host}",
                fix="look at the logs of the processes that are late",
            ) from None
        finally:
            self._exchanging = False

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
            if message["type"] == "values":
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
        if self.on_end is not None and not self.leaving and not self._exchanging:
            self.on_end(job_end)

    def _send_heartbeats(self) -> None:
        while not self.leaving and not self.ended.is_set():
            time.sleep(HEARTBEAT_INTERVAL)
            send(self._connection, self._lock, {"type": "heartbeat"})


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
