"""What the workflow files of GitHub install and run is there; their form is checked by `make lint`."""

from __future__ import annotations

import pathlib
import re
import tomllib

import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
assert WORKFLOWS


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_extras_and_folders_of_a_workflow_are_there(path):
    jobs = yaml.safe_load(path.read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [extra for line in commands for group in re.findall(r"\.\[([\w,-]+)\]", line) for extra in group.split(",")]
    assert named or any("make " in line for line in commands)
    assert set(named) <= extras.keys()
    assert all((ROOT / place).exists() for line in commands for place in re.findall(r"tests/[\w/.]+", line))
