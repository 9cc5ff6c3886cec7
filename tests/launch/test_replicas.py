"""Replicas that share the work of one command: here, as an array of Slurm, and after kill -9."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import psutil
import pytest

from command import run
from meshtune.launch.replicas import Replicas, array_script, without_options

STORY = "Once upon a time there was a dog named Max. "


@pytest.fixture
def data(tmp_path: pathlib.Path) -> pathlib.Path:
    """Records of three blocks."""
    path = tmp_path / "stories.jsonl"
    rows = [{"prompt": STORY[: 8 + number % 30], "completion": " The end."} for number in range(600)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def predict(model: pathlib.Path, data: pathlib.Path, output: pathlib.Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "meshtune", "predict", str(model), "--data", str(data), "--output", str(output)]
    command += ["--metrics", "f1,chrf", "--max-tokens", "24", *options]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    return output


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_replicas_write_the_bytes_of_one_process_also_when_one_is_killed(stories260k, data, tmp_path):
    finish(predict(stories260k, data, tmp_path / "one"))
    launcher = predict(stories260k, data, tmp_path / "many", "--replicas", "2")
    blocks = tmp_path / "many/blocks"
    deadline = time.monotonic() + 300
    while not list(blocks.glob("*.jsonl")):
        assert launcher.poll() is None, launcher.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (victim, *_) = [child for child in psutil.Process(launcher.pid).children() if "2/2" in child.cmdline()]
    victim.send_signal(signal.SIGKILL)
    output = finish(launcher)
    assert "replica 2 of 2 was ended by SIGKILL: its shard is done again" in output
    for name in ("predictions.jsonl", "metrics.json"):
        assert (tmp_path / "many" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
    log = (tmp_path / "many/logs/replica-2.log").read_text()
    assert log.count("--- meshtune predict") == 2


@pytest.mark.slow
def test_an_error_of_the_user_ends_all_replicas_with_its_message(stories260k, data, tmp_path):
    data.write_text(json.dumps({"prompt": "and then " * 400, "completion": "x"}) + "\n")
    launcher = predict(stories260k, data, tmp_path / "out", "--replicas", "2")
    output, _ = launcher.communicate(timeout=300)
    assert launcher.returncode == 2, output
    assert "no room for an answer" in output
    assert "done again" not in output


def test_an_executor_that_does_not_exist_or_is_not_installed_is_refused(stories260k, data, monkeypatch):
    command = ("predict", stories260k, "--data", data, "--replicas", 2, "--executor")
    done = run(*command, "slum")
    assert (done.returncode, "did you mean 'slurm'" in done.stderr) == (2, True), done.stderr
    monkeypatch.setitem(sys.modules, "ray", None)
    done = run(*command, "ray")
    assert done.returncode == 2
    assert "Ray is not installed" in done.stderr
    assert "[ray]" in done.stderr
    done = run("predict", stories260k, "--data", data, "--replicas", 2, "--shard", "1/2")
    assert (done.returncode, "a shard is what one replica computes" in done.stderr) == (2, True), done.stderr


def test_slurm_gets_an_array_whose_jobs_are_requeued_unless_the_user_erred(tmp_path):
    replicas = Replicas(("predict", "a model", "--data", "d.jsonl", "--output=out"), 8, 1, tmp_path / "out", lambda: 0)
    text = array_script(replicas, ("--gpus=1",))
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    lines = text.splitlines()
    assert {"#SBATCH --array=1-8", "#SBATCH --gpus=1", "#SBATCH --requeue", "export MESHTUNE_PROCESSES=1"} <= set(lines)
    assert any(
        "predict 'a model' --data d.jsonl --output=out" in line and '--shard "$SLURM_ARRAY_TASK_ID/8"' in line
        for line in lines
    )
    assert "case $code in 0|1|2) exit $code ;; esac" in lines


def test_the_options_of_replicas_are_not_those_of_each():
    line = [
        "predict",
        "m",
        "--replicas",
        "2",
        "--executor=local",
        "--rows",
        "4",
        "--resume",
        "--output",
        "x",
        "-n",
        "3",
    ]
    options = ("--replicas", "--executor", "--output")
    assert without_options(line, options, ("--resume",)) == ("predict", "m", "--rows", "4", "-n", "3")
