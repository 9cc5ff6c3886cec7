"""A disk without room: what has ended is still written down, and a request names the problem."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
from boards import READABLE, client, disk, fill, recipe, request

from meshtune.board.job import PROCESS, read_job, replace_json
from meshtune.board.runner import _claim, _write_exit
from meshtune.board.workspace import workspace_at


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    with disk(tmp_path, "256k"):
        yield tmp_path


def test_a_full_disk(small_disk: pathlib.Path):
    workspace = workspace_at(small_disk, READABLE)
    folder = workspace.jobs / "00001-job"
    folder.mkdir()
    replace_json(folder / "job.json", request(workspace, "version").to_json())
    assert _claim(folder)
    assert not _claim(folder)
    fill(small_disk)
    _write_exit(folder, {"code": 0, "seconds": 1.5})
    job = read_job(folder)
    assert job is not None
    assert (job.state, job.exit["seconds"]) == ("finished", 1.5)
    assert (folder / PROCESS).exists()
    answer = client(workspace).post("/api/jobs", json={"recipe": recipe()})
    assert answer.status_code == 507
    assert "No space left" in answer.json()["problems"][0]["message"]
    (small_disk / "junk").unlink()
    assert [path.name for path in workspace.jobs.iterdir()] == ["00001-job"]
