"""The batch script under a real Slurm."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
from slurm_nodes import two_nodes

DIRECTORY = pathlib.Path(__file__).parent
QUICKSTART = DIRECTORY.parents[1] / "src/meshtune/quickstart"
STEPS = 60

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which Slurm's commands reach the two nodes."""
    with two_nodes(tmp_path_factory.mktemp("slurm")) as variables:
        yield os.environ | variables


@pytest.fixture
def recipe(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"model: {QUICKSTART / 'model'}\n"
        f"data:\n  train: [{{path: {QUICKSTART / 'lesson.jsonl'}, format: prompt_completion}}]\n  max_length: 256\n"
        f"train: {{steps: {STEPS}, batch_size: 8}}\ncheckpoint: {{every: 10}}\noutput: {tmp_path / 'run'}\n"
        "mesh: {dp: 2}\n"
    )
    return path


def launch(slurm: dict[str, str], recipe: pathlib.Path, *overrides: str) -> str:
    """Submits the job; returns its id."""
    command = [sys.executable, "-m", "meshtune", "launch", "slurm", str(recipe), "--nodes", "2", "--gpus-per-node", "0"]
    options = ["--time", "20", "--out", str(recipe.with_suffix(".sbatch")), "--submit", *overrides]
    done = subprocess.run([*command, *options], env=slurm, cwd=recipe.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    match = re.search(r"job (\d+) submitted", done.stdout)
    assert match, done.stdout
    return match[1]


def job_fields(slurm: dict[str, str], number: str) -> dict[str, str]:
    """The fields that scontrol shows of a job."""
    shown = subprocess.run(["scontrol", "-o", "show", "job", number], env=slurm, capture_output=True, text=True)
    return dict(re.findall(r"(\w+)=(\S+)", shown.stdout))


def wait(for_: Callable[[], bool], seconds: float, message: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not for_():
        assert time.monotonic() < deadline, message()
        time.sleep(0.2)


def steps(output: pathlib.Path) -> list[int]:
    path = output / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [row["step"] for row in rows if row["kind"] == "train"]


def all_logs(tmp_path: pathlib.Path) -> str:
    files = [*tmp_path.glob("slurm-*.out"), *tmp_path.glob("run/logs/*")]
    return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in files)


def test_a_requeued_run_on_two_nodes_resumes_from_the_update_it_saved(
    slurm: dict[str, str], recipe: pathlib.Path, tmp_path: pathlib.Path
):
    output, number = tmp_path / "run", launch(slurm, recipe)
    wait(lambda: len(steps(output)) >= 5 or job_fields(slurm, number)["JobState"] == "FAILED", 180, lambda: "it hangs")
    assert job_fields(slurm, number)["JobState"] == "RUNNING", all_logs(tmp_path)
    subprocess.run(["scontrol", "requeue", number], env=slurm, check=True)
    wait(lambda: job_fields(slurm, number)["JobState"] == "PENDING", 60, lambda: str(job_fields(slurm, number)))
    stopped = max(steps(output))
    assert stopped < STEPS
    # Slurm delays a requeued job by two minutes by default.
    subprocess.run(["scontrol", "update", f"JobId={number}", "StartTime=now"], env=slurm, check=True)
    wait(lambda: job_fields(slurm, number)["JobState"] in ("COMPLETED", "FAILED"), 300, lambda: all_logs(tmp_path))
    fields = job_fields(slurm, number)
    assert (fields["JobState"], fields["Restarts"], fields["ExitCode"]) == ("COMPLETED", "1", "0:0"), all_logs(tmp_path)
    log = (output / "logs/process-0.log").read_text()
    assert "2 devices, 2 processes" in log
    # It saved when it was stopped, and no update was repeated.
    assert f"resuming after update {stopped}" in log
    assert steps(output) == list(range(1, STEPS + 1))
    assert (output / "adapter/adapter_model.safetensors").exists()


def test_a_killed_process_is_replaced_within_the_allocation(
    slurm: dict[str, str], recipe: pathlib.Path, tmp_path: pathlib.Path
):
    output, number = tmp_path / "run", launch(slurm, recipe)
    wait(lambda: (output / "checkpoints/10").is_dir(), 240, lambda: all_logs(tmp_path))
    lines = [(process, process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    running = [process for process, line in lines if "train" in line and str(recipe) in line and "python" in line[0]]
    running[-1].kill()
    wait(lambda: job_fields(slurm, number)["JobState"] in ("COMPLETED", "FAILED"), 300, lambda: all_logs(tmp_path))
    fields = job_fields(slurm, number)
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "0"), all_logs(tmp_path)
    assert "the processes start again in this allocation" in all_logs(tmp_path)
    assert "resuming after update" in (output / "logs/process-0.log").read_text()


def test_a_users_error_is_not_requeued(slurm: dict[str, str], recipe: pathlib.Path, tmp_path: pathlib.Path):
    number = launch(slurm, recipe, "mesh.dp=4")
    wait(lambda: job_fields(slurm, number)["JobState"] in ("COMPLETED", "FAILED"), 180, lambda: all_logs(tmp_path))
    fields = job_fields(slurm, number)
    assert (fields["JobState"], fields["ExitCode"]) == ("FAILED", "2:0"), all_logs(tmp_path)
    assert fields.get("Restarts") == "0"
    assert "needs 4 devices, and the job has 2" in (tmp_path / "run/logs/process-1.log").read_text()


def test_a_file_that_a_node_does_not_see_ends_the_job_before_training(
    slurm: dict[str, str], recipe: pathlib.Path, tmp_path: pathlib.Path
):
    script = recipe.with_suffix(".sbatch")
    command = [
        sys.executable,
        "-m",
        "meshtune",
        "launch",
        "slurm",
        str(recipe),
        "-N",
        "2",
        "-g",
        "0",
        "-o",
        str(script),
    ]
    subprocess.run(command, env=slurm, cwd=tmp_path, check=True, capture_output=True)
    script.write_text(script.read_text().replace(str(QUICKSTART / "model") + " ||", "/not/on/this/node ||"))
    done = subprocess.run(["sbatch", "--wait", str(script)], env=slurm, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    text = all_logs(tmp_path)
    assert "does not see /not/on/this/node: put it on shared storage" in text
    assert not (tmp_path / "run/run.json").exists()
