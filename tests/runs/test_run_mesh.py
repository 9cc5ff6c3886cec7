"""A run that was tuned on a mesh is used on it, with the answers of one device; on simulated devices and processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from compiling import FASTER
from meshtune import quickstart
from meshtune.cli.model_options import parse_mesh
from meshtune.errors import UserError
from meshtune.mesh.config import MeshConfig
from meshtune.runs.sources import run_mesh

DEVICES = "--xla_force_host_platform_device_count"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
STORIES = [
    ("Once upon a time, there was a dog.", " The dog saw a big cake and was very happy."),
    ("Lily went to the park.", " She saw a big cake and was very happy."),
    ("Tom had a red ball.", " Tom saw a big cake and was very happy."),
    ("One day, a bird sang.", " The bird saw a big cake and was very happy."),
]


def environment(devices: int) -> dict[str, str]:
    flags = f"{FASTER} {DEVICES}={devices}"
    tests = str(Path(__file__).resolve().parents[1])
    return os.environ | {
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([tests, *filter(None, sys.path)]),
    }


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe on fsdp=2, cp=1 and tp=2, and the files next to its run: other records, a text and a chat template."""
    stories = [{"prompt": prompt, "completion": completion} for prompt, completion in STORIES]
    (tmp_path / "stories.jsonl").write_text("".join(json.dumps(story) + "\n" for story in stories * 8))
    sunny = [story | {"prompt": f"{story['prompt']} It was a sunny day."} for story in stories]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(story) + "\n" for story in sunny))
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "Lily saw a big cake and was very happy. " * 3}) + "\n")
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    fields = {
        "model": str(quickstart.MODEL),
        "data": {"train": str(tmp_path / "stories.jsonl"), "max_length": 64},
        "train": {"steps": 6, "batch_size": 8},
        "method": {"kind": "lora", "rank": 4},
        "optimizer": {"learning_rate": 5e-3},
        "mesh": {"fsdp": 2, "tp": 2},
        "output": str(tmp_path / "run"),
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(fields))
    return path


@pytest.mark.slow
def test_every_command_uses_the_mesh_of_a_run_and_answers_as_one_device_does(recipe: Path, tmp_path: Path):
    """generate, chat, serve, predict and eval --compare base with mesh=run: see mesh_use_cases."""
    script = Path(__file__).with_name("mesh_use_cases.py")
    done = subprocess.run(
        [sys.executable, script, recipe, tmp_path], env=environment(4), capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]

    # The same evaluation in two processes, of which the first writes.
    options = ["--data", "records.jsonl", "--tasks", "perplexity=text.jsonl", "--max-tokens", "4", "--metrics", "f1"]
    command = [
        sys.executable,
        "-m",
        "meshtune",
        "launch",
        "local",
        "-n",
        "2",
        "-d",
        "2",
        "--",
        "eval",
        "run",
        "mesh=run",
    ]
    done = subprocess.run(
        [*command, "--compare", "base", *options, "--output", "processes"],
        env=environment(1),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    for name in ("base", "tuned"):
        rows, reference = (
            lines(tmp_path / folder / name / "predictions.jsonl") for folder in ("processes", "one/eval")
        )
        assert [row["answer"] for row in rows] == [row["answer"] for row in reference]
        np.testing.assert_allclose([row["loss"] for row in rows], [row["loss"] for row in reference], rtol=1e-4)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ({"fsdp": 4, "tp": 2}, MeshConfig(fsdp=4, tp=2)),
        ({"dp": 2, "fsdp": 2, "cp": 4}, MeshConfig(dp=2, fsdp=8)),
        ({"fsdp": 2, "cp": -1}, MeshConfig(fsdp=-1)),
    ],
)
def test_the_devices_that_split_sequences_split_parameters_when_the_run_is_used(tmp_path: Path, mesh, expected):
    fields = {"model": "some/model", "data": {"train": "data.jsonl"}, "output": str(tmp_path), "mesh": mesh}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(fields))
    assert run_mesh(tmp_path) == expected
    assert parse_mesh(["mesh=run"], str(tmp_path)) == expected


def test_a_mesh_of_what_is_no_run_or_of_one_that_has_chosen_none_is_an_error(tmp_path: Path):
    with pytest.raises(UserError, match=r"only a run says which mesh it was tuned on[\s\S]*mesh\.tp=2"):
        parse_mesh(["mesh=run"], str(quickstart.MODEL))
    fields = {"model": "some/model", "data": {"train": "data.jsonl"}, "output": str(tmp_path)}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(fields))
    with pytest.raises(UserError, match="the run has not chosen its mesh yet"):
        run_mesh(tmp_path)
