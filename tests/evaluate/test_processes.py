"""Evaluations of two processes that share a mesh: a run's own at its end, and of a run against another model."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("lm_eval", reason="the extra evaluate is not installed")

import published

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
MESHTUNE = [sys.executable, "-m", "meshtune"]
TASK = "perplexity"


def command(*arguments: object) -> str:
    done = subprocess.run([*MESHTUNE, *map(str, arguments)], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def numbers(folder: pathlib.Path) -> dict[str, float]:
    """The totals of the records and of the task."""
    totals = json.loads((folder / "metrics.json").read_text())
    (task,) = json.loads((folder / "tasks.json").read_text())["tasks"]
    return {name: value for name, value in [*totals.items(), *task["metrics"].items()] if isinstance(value, float)}


@pytest.fixture(scope="module")
def run(stories260k, tmp_path_factory) -> pathlib.Path:
    """A run of two processes that ends with an evaluation."""
    folder = tmp_path_factory.mktemp("processes")
    rows = [{"prompt": f"The {animal} said", "completion": " hello to Lily."} for animal in published.ANIMALS]
    published.write_lines(folder / "train.jsonl", rows)
    recipe = {
        "model": {"path": str(stories260k)},
        "data": {"train": str(folder / "train.jsonl"), "validation": 2, "max_length": 32},
        "output": str(folder / "out"),
        "mesh": {"fsdp": 2},
        "train": {"steps": 8, "batch_size": 4},
        "optimizer": {"learning_rate": 0.01},
        "eval": {"every": None},
        "evaluate": {"tasks": {TASK: str(published.perplexity(folder))}, "new_tokens": 6, "metrics": ["f1"]},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    command("launch", "local", "-n", 2, folder / "recipe.yaml")
    return folder / "out"


def test_a_run_of_two_processes_ends_with_the_numbers_of_one(run: pathlib.Path, tmp_path: pathlib.Path):
    files = ("--tasks", f"{TASK}={run.parent / 'stories.jsonl'}", "--metrics", "f1", "--max-tokens", 6)
    command("eval", run, "--compare", "base", "--output", tmp_path / "alone", *files)
    for side in ("base", "tuned"):
        several, single = numbers(run / "evaluation/base" / side), numbers(tmp_path / "alone" / side)
        assert single == pytest.approx(several, rel=1e-5)
    base, tuned = (numbers(run / "evaluation/base" / side) for side in ("base", "tuned"))
    assert tuned["loss"] < base["loss"]


def test_two_processes_compare_a_run_with_another_model(run: pathlib.Path, stories260k, tmp_path: pathlib.Path):
    command(
        "launch", "local", "-n", 2, "--", "eval", run, "mesh=run", "--compare", stories260k, "--output", tmp_path / "e"
    )
    for side, original in (("before", "base"), ("after", "tuned")):
        compared, expected = (
            json.loads((folder / "metrics.json").read_text())
            for folder in (tmp_path / "e" / side, run / "evaluation/base" / original)
        )
        assert compared["loss"] == pytest.approx(expected["loss"], rel=1e-5)
