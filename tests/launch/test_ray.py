"""`meshtune launch ray` on a real Ray, in a network namespace with loopback only: Ray listens on all interfaces."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import time

import psutil
import pytest
from loopback import loopback_only
from safetensors.numpy import load_file

QUICKSTART = pathlib.Path(__file__).parents[2] / "src/meshtune/quickstart"
STEPS = 40
MESHTUNE = [sys.executable, "-m", "meshtune"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra ray is not installed"),
]


@pytest.fixture(scope="module")
def namespace() -> list[str]:
    """The beginning of a command that runs in a network namespace. Skips the tests where none may be made."""
    return loopback_only()


def recipe(folder: pathlib.Path) -> pathlib.Path:
    path = folder / "recipe.yaml"
    path.write_text(
        f"model: {QUICKSTART / 'model'}\n"
        f"data:\n  train: [{{path: {QUICKSTART / 'lesson.jsonl'}, format: prompt_completion}}]\n  max_length: 256\n"
        f"train: {{steps: {STEPS}, batch_size: 8}}\ncheckpoint: {{every: 10}}\n"
        f"output: {folder / 'run'}\nmesh: {{dp: 2}}\n"
    )
    return path


def start(command: list[str], folder: pathlib.Path) -> subprocess.Popen[str]:
    env = os.environ | {"JAX_PLATFORMS": "cpu", "RAY_TMPDIR": "/tmp"}
    env = {name: value for name, value in env.items() if name != "XLA_FLAGS"}
    with (folder / "launcher.log").open("w") as log:
        return subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=log, text=True)


def digest(folder: pathlib.Path) -> str:
    """A hash of all trained weights, without the file's metadata."""
    weights = load_file(folder / "run/adapter/adapter_model.safetensors")
    return hashlib.sha256(b"".join(weights[name].tobytes() for name in sorted(weights))).hexdigest()


def processes(launcher: subprocess.Popen[str], folder: pathlib.Path) -> list[psutil.Process]:
    """The training processes of a run, wherever Ray has started them."""
    lines = [(process, process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    return [process for process, line in lines if line[1:4] == ["-m", "meshtune", "train"] and str(folder) in line[4]]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the result of `launch local`."""
    folder = tmp_path_factory.mktemp("local")
    launcher = start([*MESHTUNE, "launch", "local", "-n", "2", str(recipe(folder))], folder)
    assert launcher.wait(timeout=400) == 0, (folder / "launcher.log").read_text()
    return digest(folder)


def test_a_run_whose_worker_is_killed_has_the_bits_of_launch_local(namespace, expected, tmp_path):
    options = ["--workers", "2", "--gpus-per-worker", "0"]
    launcher = start([*namespace, *MESHTUNE, "launch", "ray", str(recipe(tmp_path)), *options], tmp_path)
    log, deadline = tmp_path / "launcher.log", time.monotonic() + 400
    while not (tmp_path / "run/checkpoints/10").is_dir():
        assert launcher.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    running = processes(launcher, tmp_path)
    assert len(running) == 2
    running[-1].send_signal(signal.SIGKILL)
    assert launcher.wait(timeout=600) == 0, log.read_text()
    text = log.read_text()
    assert "a process was lost: all start again from the last checkpoint" in text
    assert "resuming after update" in text
    assert digest(tmp_path) == expected
    logs = sorted(path.name for path in (tmp_path / "run/logs").iterdir())
    assert logs[:2] == ["process-0.log", "process-1.log"]
    assert (tmp_path / "run/metrics.jsonl").stat().st_size
    assert processes(launcher, tmp_path) == []


def test_an_error_of_the_user_is_not_retried(namespace, tmp_path):
    options = ["--workers", "2", "--gpus-per-worker", "0"]
    launcher = start([*namespace, *MESHTUNE, "launch", "ray", str(recipe(tmp_path)), "mesh.dp=4", *options], tmp_path)
    assert launcher.wait(timeout=400) == 2, (tmp_path / "launcher.log").read_text()
    text = (tmp_path / "launcher.log").read_text()
    assert "needs 4 devices, and the job has 2" in text
    assert "start again" not in text


def test_workers_for_whom_there_is_no_room_are_refused(namespace, tmp_path):
    options = ["--workers", "900", "--gpus-per-worker", "0", "--start-timeout", "2"]
    launcher = start([*namespace, *MESHTUNE, "launch", "ray", str(recipe(tmp_path)), *options], tmp_path)
    assert launcher.wait(timeout=400) == 2
    assert "Ray has had no room for 900 workers of 1 CPU" in (tmp_path / "launcher.log").read_text()
