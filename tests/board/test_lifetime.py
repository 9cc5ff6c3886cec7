"""A real run through a real server that is killed with -9 in its middle."""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from boards import recipe, wait

from meshtune.board.job import JOB_VARIABLE

STEPS = 400


@contextlib.contextmanager
def board(root: pathlib.Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """(address, process) of `meshtune board`."""
    command = [sys.executable, "-m", "meshtune", "board", "--root", str(root), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[1], process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def event(lines: Iterator[str], kind: str) -> tuple[str, Any]:
    """(id, data) of the next event of a kind."""
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(": ")
        if line:
            fields[name] = value
        elif fields.get("event") == kind:
            return fields.get("id", ""), json.loads(fields["data"])
        else:
            fields = {}
    raise AssertionError("the stream ended")


def steps_of(url: str) -> list[int]:
    return [row["step"] for row in httpx.get(f"{url}/metrics").json()["rows"] if row["kind"] == "train"]


@pytest.mark.timeout(240)
def test_a_run_outlives_its_server_and_is_stopped(tmp_path: pathlib.Path):
    text = recipe(
        "runs/first", steps=STEPS, extra="checkpoint: {every: 100}\nsample: {prompts: [Once], max_tokens: 4}\n"
    )
    with board(tmp_path) as (address, server):
        created = httpx.post(f"{address}/api/jobs", json={"recipe": text})
        assert created.status_code == 201, created.text
        job = f"/api/jobs/{created.json()['id']}"
        twice = httpx.post(f"{address}/api/jobs", json={"recipe": text})
        assert twice.json()["problems"][0]["path"] == "output"
        wait(lambda: steps_of(address + job), 120)
        with httpx.stream("GET", f"{address}/api/events", params={"job": created.json()["id"]}) as stream:
            cursor, first = event(stream.iter_lines(), "run")
        before = [row["step"] for row in first["metrics"]["rows"]]
        assert before[0] == 1
        server.send_signal(signal.SIGKILL)
        server.wait()

    with board(tmp_path) as (address, _):
        (listed,) = httpx.get(f"{address}/api/jobs").json()["jobs"]
        assert listed["state"] == "running"
        wait(lambda: len(steps_of(address + job)) > len(before), 60)
        # A browser that comes back gets what it has not seen, and nothing twice.
        query, headers = {"job": listed["id"]}, {"last-event-id": cursor}
        with httpx.stream("GET", f"{address}/api/events", params=query, headers=headers) as stream:
            _, news = event(stream.iter_lines(), "run")
        assert news["metrics"]["rows"][0]["step"] == before[-1] + 1
        for _ in range(2):
            assert httpx.post(f"{address}{job}/stop", json={}).status_code == 200
        stopped = wait(
            lambda: (current := httpx.get(address + job).json())["state"] not in ("running", "stopping") and current
        )
        assert stopped["state"] == "stopped", httpx.get(f"{address}{job}/log").text
        done = steps_of(address + job)
        assert stopped["checkpoints"][-1] == done[-1] < STEPS
        assert done == list(range(1, done[-1] + 1))
        assert not [process for process in psutil.process_iter() if _is_of(process, tmp_path)]
        report = (tmp_path / "runs/first/report.html").read_text()
        assert "<svg" in report
        assert re.search(r"https?://", report) is None


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_stopped_run_is_resumed_and_branched(tmp_path: pathlib.Path):
    text = recipe(
        "runs/first", steps=STEPS, extra="checkpoint: {every: 100}\nsample: {prompts: [Once], max_tokens: 4}\n"
    )
    with board(tmp_path) as (address, _):
        created = httpx.post(f"{address}/api/jobs", json={"recipe": text}).json()
        job = f"/api/jobs/{created['id']}"
        wait(lambda: steps_of(address + job), 120)
        httpx.post(f"{address}{job}/stop", json={})
        wait(lambda: httpx.get(address + job).json()["state"] == "stopped")
        done = steps_of(address + job)
        assert httpx.post(f"{address}{job}/resume", json={}).json()["attempt"] == 2
        wait(lambda: steps_of(address + job)[-1:] > done[-1:], 120)
        again = {"step": done[-1], "output": "runs/second", "overrides": [f"train.steps={done[-1] + 3}"]}
        second = httpx.post(f"{address}{job}/branch", json=again | {"devices": {"beside": True}})
        assert second.status_code == 201, second.text
        ended = ("finished", "failed", "stopped", "lost")
        wait(lambda: httpx.get(address + job).json()["state"] in ended, 120)
        assert steps_of(address + job) == list(range(1, STEPS + 1))
        assert (tmp_path / "runs/first/adapter").is_dir()
        branched = f"{address}/api/jobs/{second.json()['id']}"
        last = wait(lambda: (current := httpx.get(branched).json())["state"] in ended and current, 120)
        assert last["state"] == "finished", last["reason"]
        assert steps_of(branched) == list(range(1, done[-1] + 4))


def _is_of(process: psutil.Process, root: pathlib.Path) -> bool:
    with contextlib.suppress(psutil.Error, OSError):
        return process.environ().get(JOB_VARIABLE, "").startswith(str(root))
    return False
