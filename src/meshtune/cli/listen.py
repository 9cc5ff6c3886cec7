"""The sockets of commands that answer over HTTP."""

from __future__ import annotations

import socket

from meshtune.errors import UserError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]"})  # in the Host header
KEEP_ALIVE = 75  # seconds that an idle connection stays open


def url(host: str, listener: socket.socket) -> str:
    """The address of a server that listens."""
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def listener_at(host: str, port: int) -> socket.socket:
    """A socket that listens, before anything is loaded. Raises UserError where the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, OverflowError) as problem:
        listener.close()
        reason = problem.strerror if isinstance(problem, OSError) and problem.strerror else str(problem)
        raise UserError(
            f"{host}:{port} cannot be listened on: {reason}",
            where="--host, --port",
            fix="stop what uses the port, or give another one (--port 0 takes any that is free)",
        ) from problem
    return listener
