"""Boards for the tests: one in this process, and jobs that are real commands of seconds."""

from __future__ import annotations

import contextlib
import json
import pathlib
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.routing import Mount, Route
from starlette.testclient import TestClient

from meshtune.board.app import create_app
from meshtune.board.job import JobRequest
from meshtune.board.routes import all_routes
from meshtune.board.state import BoardState
from meshtune.board.workspace import Workspace
from meshtune.quickstart import DIRECTORY, LESSON, MODEL
from meshtune.serve.guard import Gate

TOKEN = "a token of these tests"
ADDRESS = "http://127.0.0.1:7860"
DATA_RECIPE = {"teacher": str(MODEL), "documents": "inside", "kinds": ["qa"], "output": "made/x"}


def client(workspace: Workspace, **options: Any) -> TestClient:
    """A client of a board over `workspace`."""
    app = create_app(workspace, hosts={"127.0.0.1"}, **options)
    return TestClient(app, base_url=ADDRESS, raise_server_exceptions=False)


def routes_of(workspace: Workspace) -> list[Route]:
    """The routes of a board over `workspace`."""
    state = BoardState(workspace, Gate(), None, "cookie")
    routes = all_routes(state)
    assert [type(route) for route in routes if not isinstance(route, Route)] == [Mount]
    return [route for route in routes if isinstance(route, Route)]


def recipe(output: str = "runs/first", *, steps: int = 6, extra: str = "") -> str:
    """The quickstart's recipe, shortened."""
    return (
        f"model: {MODEL}\noutput: {output}\nmethod: {{kind: lora, rank: 4}}\n"
        f"data:\n  train: [{{path: {LESSON}, format: prompt_completion}}]\n  max_length: 128\n  validation: 8\n"
        f"train: {{steps: {steps}, batch_size: 2}}\n{extra}"
    )


def request(workspace: Workspace, *arguments: str, **fields: Any) -> JobRequest:
    """A job that runs `meshtune ARGUMENTS`."""
    values = {"kind": "train", "name": "job", **fields}
    return JobRequest(arguments=arguments, root=str(workspace.root), **values)


def long_command(workspace: Workspace) -> tuple[str, ...]:
    """A command that lasts until a signal comes: another board."""
    return ("board", "--port", "0", "--root", str(workspace.root / "inner"))


def submit_job(address: str, body: dict[str, Any]) -> str:
    """The id of a job that a board at `address` has started, as another of its pages would have."""
    content, headers = json.dumps(body).encode(), {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{address}/api/jobs", content, headers)) as answer:
        return json.load(answer)["id"]


def wait(for_: Callable[[], Any], seconds: float = 60.0) -> Any:
    """The first value that is true."""
    deadline = time.monotonic() + seconds
    while not (value := for_()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
    return value


READABLE = (pathlib.Path(DIRECTORY),)


@contextlib.contextmanager
def disk(folder: pathlib.Path, size: str) -> Iterator[None]:
    """A file system of `size` at `folder`. Skips the test where it may not be mounted."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the permission to mount a small file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: pathlib.Path) -> None:
    """Writes a file, junk, until there is no room left."""
    with (folder / "junk").open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 4096):
            pass
