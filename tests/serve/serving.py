"""A server in a thread of this process, for tests that ask it over a real socket."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import uvicorn

from meshtune.serve.app import create_app
from meshtune.serve.guard import Gate
from meshtune.serve.models import Models
from meshtune.serve.server import Limits, Server

TOKEN = "a token of these tests"


@contextlib.contextmanager
def serving(models: Models, limits: Limits | None = None, **options) -> Iterator[str]:
    """The address of a server in a thread of this process."""
    app = create_app(models, **options)
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(uvicorn.Config(app, log_level="warning"), Gate(), limits=limits)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
