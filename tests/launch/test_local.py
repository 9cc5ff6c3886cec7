"""`meshtune launch local`: real processes of the real command."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
from job import free_port

from compiling import FASTER
from meshtune.errors import UserError
from meshtune.launch import local
from meshtune.launch.local import check_gpus

QUICKSTART = pathlib.Path(__file__).parents[2] / "src/meshtune/quickstart"
ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FASTER}
COMMAND = [sys.executable, "-m", "meshtune", "launch", "local"]


@pytest.fixture
def recipe(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"model: {QUICKSTART / 'model'}\n"
        f"data:\n  train: [{{path: {QUICKSTART / 'lesson.jsonl'}, format: prompt_completion}}]\n  max_length: 64\n"
        f"train: {{steps: 4, batch_size: 4}}\noutput: {tmp_path / 'run'}\n"
    )
    return path


def launch(*arguments: str | pathlib.Path) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)


def test_two_processes_train_one_run(recipe: pathlib.Path, tmp_path: pathlib.Path):
    done = launch("--processes", "2", "--devices", "2", recipe, "mesh.dp=4")
    assert done.returncode == 0, done.stdout + done.stderr
    logs = [(tmp_path / f"run/logs/process-{index}.log").read_text() for index in range(2)]
    assert "4 devices, 2 processes, 1 host(s)" in logs[0]
    assert done.stdout.strip().splitlines()[-1] in logs[0]
    assert (tmp_path / "run/adapter/adapter_model.safetensors").exists()
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) >= 4  # written by one process, not by two


@pytest.mark.parametrize("equal", [pytest.param(True, marks=pytest.mark.slow), False])
def test_hosts_with_caches_of_their_own_train_on_the_same_files_or_not_at_all(recipe, tmp_path, equal):
    lesson = (QUICKSTART / "lesson.jsonl").read_text()
    processes = []
    coordinator = f"localhost:{free_port()}"
    for index in range(2):
        folder = tmp_path / str(index)
        folder.mkdir()
        lines = lesson.splitlines()
        (folder / "lesson.jsonl").write_text("\n".join(lines if equal or index == 0 else lines[1:]))
        settings = {"MESHTUNE_CACHE": str(folder), "MESHTUNE_PROCESS": str(index), "MESHTUNE_PROCESSES": "2"}
        command = [sys.executable, "-m", "meshtune", "train", str(recipe), "data.train=lesson.jsonl", "mesh.dp=2"]
        environment = {**ENVIRONMENT, **settings, "MESHTUNE_COORDINATOR": coordinator}
        output = (tmp_path / f"{index}.log").open("wb")
        processes.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output))
    codes = [process.wait(timeout=240) for process in processes]
    logs = [(tmp_path / f"{index}.log").read_text() for index in range(2)]
    assert codes == ([0, 0] if equal else [2, 2]), logs
    for log in logs if not equal else ():
        assert "the processes differ in what they read: training data is" in " ".join(log.split())


def test_an_error_in_the_recipe_starts_no_process(recipe: pathlib.Path, tmp_path: pathlib.Path):
    done = launch("-n", "2", recipe, "method.rnak=3")
    assert done.returncode == 2
    assert "did you mean" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_users_error_in_the_processes_is_the_launchers_exit_code(recipe: pathlib.Path, tmp_path: pathlib.Path):
    done = launch("-n", "2", recipe, "model=/nowhere/at/all")
    assert done.returncode == 2, done.stderr
    text = (tmp_path / "run/logs/process-1.log").read_text()
    assert re.search(r"error: .*nowhere", text)


def worker(launcher: subprocess.Popen[str], index: int) -> psutil.Process:
    """The process of the run with this index."""
    children = psutil.Process(launcher.pid).children()
    return next(child for child in children if child.environ().get("MESHTUNE_PROCESS") == str(index))


def has_met(run: pathlib.Path) -> bool:
    """Whether the two processes of a run see each other's devices."""
    log = run / "logs/process-0.log"
    return log.exists() and "2 processes" in log.read_text()


def has_trained(run: pathlib.Path) -> bool:
    return (run / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("victim", "is_ready"),
    [(1, has_met), *(pytest.param(victim, has_trained, marks=pytest.mark.slow) for victim in (0, 1))],
)
def test_a_killed_worker_makes_the_launcher_exit_with_75(recipe, tmp_path, victim, is_ready):
    run = tmp_path / "run"
    command = [*COMMAND, "-n", "2", str(recipe), "mesh.dp=2", "train.steps=1000000"]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as launcher:
        try:
            deadline = time.monotonic() + 300
            while not is_ready(run):
                assert launcher.poll() is None, launcher.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            os.kill(worker(launcher, victim).pid, signal.SIGKILL)
            _, errors = launcher.communicate(timeout=120)
        finally:
            launcher.terminate()  # a run of a million updates must not outlive a test that fails
    assert launcher.returncode == 75, errors
    assert f"error: process {victim} of 2 on " in (run / f"logs/process-{1 - victim}.log").read_text()
    assert victim == 0 or "process 1 of 2 was ended by SIGKILL" in errors


def test_gpus_that_cannot_be_divided_between_the_processes_are_an_error():
    with pytest.raises(UserError, match="8 GPUs do not divide by 3 processes"):
        check_gpus(3, None, 8)
    with pytest.raises(UserError, match="4 processes of 4 devices need 16 GPUs, and this machine has 8"):
        check_gpus(4, 4, 8)
    check_gpus(4, 2, 8)
    check_gpus(3, 5, 0)


def test_a_worker_killed_before_the_processes_meet_is_named(tmp_path, monkeypatch):
    """Process 0 goes on waiting for it, until the launcher ends process 0."""
    monkeypatch.setattr(local, "EXIT_GRACE", 0.2)
    workers = []
    for index, script in enumerate(("exec sleep 60", "kill -9 $$")):
        log = tmp_path / f"process-{index}.log"
        log.touch()
        read, write = os.pipe()
        workers.append(local.Worker(index, subprocess.Popen(["sh", "-c", script], stdout=write), log, read))
        os.close(write)
    killed = local._wait(workers)
    for ended in workers:
        os.close(ended.output)
    assert killed == {0}
    assert local._first_failure(workers, killed) is workers[1]
