"""`meshtune launch local`: real processes of the real command."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

from meshtune.errors import UserError
from meshtune.launch.local import check_gpus

LESSON = pathlib.Path(__file__).parents[2] / "src/meshtune/quickstart"


@pytest.fixture
def recipe(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"model: {LESSON / 'model'}\n"
        f"data:\n  train: [{{path: {LESSON / 'lesson.jsonl'}, format: prompt_completion}}]\n  max_length: 64\n"
        f"train: {{steps: 4, batch_size: 4}}\noutput: {tmp_path / 'run'}\n"
    )
    return path


def launch(*arguments: str | pathlib.Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "meshtune", "launch", "local", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)


def test_two_processes_train_one_run(recipe: pathlib.Path, tmp_path: pathlib.Path):
    done = launch("--processes", "2", "--devices", "2", recipe, "mesh.dp=4")
    assert done.returncode == 0, done.stdout + done.stderr
    logs = [(tmp_path / f"run/logs/process-{number}.log").read_text() for number in range(2)]
    assert "4 devices, 2 processes, 1 host(s)" in logs[0]
    assert done.stdout.strip().splitlines()[-1] in logs[0]
    assert (tmp_path / "run/adapter/adapter_model.safetensors").exists()
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) >= 4  # written by one process, not by two


def test_a_mistake_in_the_recipe_starts_nothing(recipe: pathlib.Path, tmp_path: pathlib.Path):
    done = launch("-n", "2", recipe, "method.rnak=3")
    assert done.returncode == 2
    assert "did you mean" in done.stderr
    assert not (tmp_path / "run").exists()


def test_what_one_process_finds_wrong_ends_all_with_its_code(recipe: pathlib.Path, tmp_path: pathlib.Path):
    done = launch("-n", "2", recipe, "model=/nowhere/at/all")
    assert done.returncode == 2, done.stderr
    text = (tmp_path / "run/logs/process-1.log").read_text()
    assert re.search(r"error: .*nowhere", text)


def test_gpus_that_do_not_do_for_the_processes_are_an_error():
    with pytest.raises(UserError, match="8 GPUs do not divide by 3 processes"):
        check_gpus(3, None, 8)
    with pytest.raises(UserError, match="4 processes of 4 devices need 16 GPUs, and this machine has 8"):
        check_gpus(4, 4, 8)
    check_gpus(4, 2, 8)
    check_gpus(3, 5, 0)
