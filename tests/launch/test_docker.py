"""The Dockerfiles install extras that the package has; building them needs a Docker engine and is not tested."""

from __future__ import annotations

import pathlib
import re
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def test_there_is_a_dockerfile_for_each_kind_of_device():
    assert {path.name.split(".")[0] for path in FILES} >= {"cpu", "cuda", "rocm", "tpu"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_dockerfile_installs_extras_that_exist_and_runs_no_shell(path: pathlib.Path):
    text = path.read_text()
    defaults = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
    named = [defaults.get(word.strip("${}"), word) for word in re.findall(r"/src\[([^\]]+)\]", text)]
    assert set(named) <= EXTRAS
    assert re.search(r'^CMD \["meshtune"', text, re.MULTILINE)
    assert f"-f docker/{path.name}" in text.splitlines()[0] + text.splitlines()[1]
