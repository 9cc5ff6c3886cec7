"""A workspace with links out of it, a run that has ended, and a planner that answers nothing."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import pytest
from boards import READABLE, recipe, request

from meshtune.board import queue
from meshtune.board.job import EXIT, Job
from meshtune.board.state import Planner
from meshtune.board.workspace import Workspace, workspace_at
from meshtune.quickstart import DIRECTORY

MODEL = str(DIRECTORY / "model")


@pytest.fixture
def workspace(tmp_path: pathlib.Path) -> Workspace:
    workspace = workspace_at(tmp_path / "root", READABLE)
    outside = tmp_path / "outside"
    shutil.copytree(MODEL, outside / "model")
    (outside / "file").write_text('{"text": "a secret"}\n')
    (outside / "run.json").write_text("{}")
    (workspace.root / "link").symlink_to(outside)
    (workspace.root / "file-link").symlink_to(outside / "file")
    (workspace.root / "inside").mkdir()
    return workspace


@pytest.fixture
def planner_requests(monkeypatch) -> list[dict[str, Any]]:
    """Records requests to the planning process, which answers nothing."""
    requests: list[dict[str, Any]] = []

    async def ask(_: Planner, fields: dict[str, Any], page: str) -> dict[str, Any]:
        requests.append(json.loads(json.dumps(fields, allow_nan=False)))
        return {}

    monkeypatch.setattr(Planner, "ask", ask)
    return requests


@pytest.fixture
def job(workspace: Workspace) -> Job:
    """A run that has ended, of a recipe that can be branched from and resumed."""
    fields = request(workspace, "train", "{job}/recipe.yaml", output=str(workspace.root / "runs/first"))
    folder = queue._write(workspace, [], fields, recipe())
    (folder / EXIT).write_text('{"code": 1}')
    return queue.find(workspace, folder.name)
