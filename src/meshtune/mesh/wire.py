"""The line between the processes of a job: what is said on it, and how.

A star of TCP connections: process 0 keeps the hub (mesh.hub), every process, 0 too, is a member (mesh.member). A
process that dies closes its connection, which the hub sees at once; a host that is gone sends no beats. JSON, one
object a line.

Why not JAX's coordination service alone: it ends the others by an abort that names a task number, after minutes; its
values are not a public interface; and it cannot tell of versions of JAX that differ.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

from meshtune.errors import UserError

BEAT, SILENCE = 5.0, 40.0  # seconds: between signs of life, and without one until a process counts as lost
LONGEST = 1 << 22  # bytes of a message
GREETING = "meshtune-1"
LOST = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong with the run, the same command resumes it


@dataclasses.dataclass(frozen=True)
class Ending:
    """Why a job ends. `kind`: 'start' (it cannot begin), 'lost' (a process is gone) or 'failed' (one raised)."""

    kind: str
    what: str
    process: int | None = None
    host: str = ""
    where: str | None = None
    fix: str | None = None
    code: int = 1

    def error(self) -> UserError:
        """The same as an exception."""
        return UserError(self.what, where=self.where, fix=self.fix)


def lost(process: int, processes: int, host: str, why: str) -> Ending:
    """The ending for a process that is gone."""
    return Ending(
        "lost",
        f"process {process} of {processes} on {host} was lost: {why}",
        process=process,
        host=host,
        fix="the same command with resume=true goes on from the last checkpoint",
        code=LOST,
    )


def quick(line: socket.socket) -> None:
    """Small messages leave at once."""
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def send(line: socket.socket, lock: threading.Lock, message: dict[str, Any]) -> bool:
    """False if the other side is gone: whoever reads from it finds that out and says it."""
    try:
        with lock:
            line.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        return False
    return True


def messages(line: socket.socket) -> Iterator[dict[str, Any]]:
    """Whole messages until the connection closes or falls silent; whatever is not ours ends it."""
    held = b""
    while True:
        try:
            more = line.recv(1 << 16)
        except OSError:
            return
        held += more
        if not more or len(held) > LONGEST:
            return
        *lines, held = held.split(b"\n")
        for text in lines:
            try:
                message = json.loads(text)
            except ValueError:
                return
            if not isinstance(message, dict) or "t" not in message:
                return
            yield message
