"""Jobs as files and processes: real commands of `meshtune`, started, stopped and killed."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
from importlib.metadata import version

import pytest
from boards import READABLE, long_command, request, wait

from meshtune.board import queue
from meshtune.board.job import (
    EXIT,
    JOB_VARIABLE,
    PROCESS,
    RECIPE,
    STOP,
    end_processes_of,
    identify,
    read_job,
    read_jobs,
    replace_json,
)
from meshtune.board.runner import main as run
from meshtune.board.workspace import Workspace, workspace_at
from meshtune.errors import UserError


@pytest.fixture
def workspace(tmp_path: pathlib.Path) -> Workspace:
    return workspace_at(tmp_path / "root", READABLE)


def state(workspace: Workspace, job_id: str) -> str:
    return queue.find(workspace, job_id).state


def test_jobs_take_their_turn_without_a_server(workspace):
    """The second waits for the first one's devices, and is started by the first one's runner when that has ended."""
    first = queue.add(workspace, request(workspace, *long_command(workspace), name="one two!"))
    second = queue.add(workspace, request(workspace, "version"), "the recipe\n")
    third = queue.add(workspace, request(workspace, "version", devices={"keys": ["cpu"], "beside": True}))
    assert (first.id, second.id) == ("00001-one-two", "00002-job")
    assert [job.state for job in read_jobs(workspace.jobs)][:2] == ["running", "queued"]
    wait(lambda: state(workspace, third.id) == "finished")
    assert state(workspace, second.id) == "queued"
    wait(lambda: b"board" in (first.folder / "log.txt").read_bytes())
    with pytest.raises(UserError, match="runs"):
        queue.remove(workspace, first.id)
    queue.stop(workspace, first.id)
    queue.stop(workspace, first.id)
    wait(lambda: state(workspace, second.id) == "finished")
    assert queue.find(workspace, first.id).exit["code"] == 0
    assert version("meshtune") in (second.folder / "log.txt").read_text()
    assert (second.folder / RECIPE).read_text() == "the recipe\n"
    queue.remove(workspace, first.id)
    assert [job.id for job in read_jobs(workspace.jobs)] == [second.id, third.id]
    with pytest.raises(queue.NoSuchJob):
        queue.find(workspace, "../../etc")


def test_a_job_whose_processes_were_killed_is_lost_and_leaves_nothing(workspace):
    job = queue.add(workspace, request(workspace, *long_command(workspace)))
    job = wait(lambda: (current := queue.find(workspace, job.id)).child and current)
    assert job.runner is not None
    assert job.child is not None
    job.runner.send(signal.SIGKILL)
    job.child.send(signal.SIGKILL)
    wait(lambda: state(workspace, job.id) == "lost")
    again = queue.resume(workspace, job.id)
    assert again.attempt == 2
    assert again.request.arguments[-1] == "--resume"
    queue.stop(workspace, job.id, now=True)
    wait(lambda: state(workspace, job.id) not in ("queued", "running", "stopping"))


def test_a_job_is_run_by_one_runner(workspace):
    """A server that was killed between starting a runner and saying so starts another one: it leaves at once."""
    job = queue.add(workspace, request(workspace, "version"))
    wait(lambda: state(workspace, job.id) == "finished")
    assert run(job.folder) == 1


def test_a_command_that_fails_says_why(workspace):
    job = queue.add(workspace, request(workspace, "train", "nothing.yaml"))
    wait(lambda: state(workspace, job.id) == "failed")
    assert queue.find(workspace, job.id).exit["code"] == 2


def test_one_output_has_one_writer(workspace):
    writer = queue.add(workspace, request(workspace, *long_command(workspace), output="/x/run"))
    with pytest.raises(UserError, match=f"job {writer.id} writes to this output"):
        queue.add(workspace, request(workspace, "version", output="/x/run"))
    queue.stop(workspace, writer.id, now=True)
    wait(lambda: state(workspace, writer.id) in ("stopped", "failed"))


def test_a_process_is_more_than_its_number():
    """A pid that the kernel gave to another process, a machine that was started again, another machine."""
    known = identify(os.getpid())
    assert known is not None
    assert known.is_alive
    assert not dataclasses.replace(known, started="1").is_alive
    rebooted = dataclasses.replace(known, boot="another")
    assert not rebooted.is_alive
    assert rebooted.is_local
    assert not dataclasses.replace(rebooted, host="another").is_local
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child_id = wait(lambda: identify(child.pid))
    wait(lambda: not child_id.is_alive)  # it has ended, and nobody has waited for it
    child.wait()


def test_state_follows_from_files_alone(workspace):
    """No clock is asked: only exit codes and processes."""
    folder = workspace.jobs / "00001-x"
    folder.mkdir()
    assert read_job(folder) is None
    replace_json(folder / "job.json", request(workspace, "version").to_json())
    assert read_job(folder).state == "queued"
    process = identify(os.getpid())
    for fields, code, expected in [
        ({}, None, "running"),
        ({"started": "1"}, None, "lost"),
        ({"started": "1", "boot": "b", "host": "h"}, None, "elsewhere"),
        ({"started": "1"}, 0, "finished"),
        ({"started": "1"}, 2, "failed"),
        ({"started": "1"}, -15, "failed"),  # nobody asked it to stop
    ]:
        replace_json(folder / PROCESS, {"runner": {**process.to_json(), **fields}})
        if code is not None:
            replace_json(folder / EXIT, {"code": code})
        assert read_job(folder).state == expected
    (folder / STOP).touch()
    assert read_job(folder).state == "stopped"
    (folder / "job.json").write_text("{ broken")
    assert read_job(folder) is None
    assert read_jobs(workspace.jobs) == []


def test_what_a_command_leaves_running_is_ended(tmp_path):
    """And nothing of a job of another board, which may have the same id."""
    folder, same_id = tmp_path / "one/00001-first", tmp_path / "two/00001-first"
    env = os.environ | {JOB_VARIABLE: str(folder)}
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=env, start_new_session=True)
    assert end_processes_of(same_id) == []
    wait(lambda: process.pid in end_processes_of(folder))
    assert process.wait() == -signal.SIGKILL
