"""The Dockerfiles install extras that the package has; docker/prove.py carries out their steps without Docker."""

from __future__ import annotations

import pathlib
import re
import tomllib

import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[2]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def test_there_is_a_dockerfile_for_each_kind_of_device_and_cuda_s_is_also_for_cpus():
    assert {path.name.split(".")[0] for path in FILES} == {"cuda", "rocm", "tpu"}
    assert "--build-arg DEVICE=cpu" in (ROOT / "docker/cuda.Dockerfile").read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_dockerfile_installs_extras_that_exist_and_runs_no_shell(path: pathlib.Path):
    text = path.read_text()
    named = [
        name for extras in re.findall(r"/src\[(\w[^\]]*)\]|EXTRAS=(\S+)", text) for name in ",".join(extras).split(",")
    ]
    assert {"serve", "evaluate"} <= set(named) - {""} <= EXTRAS
    assert re.search(r"^USER (?!root|0\b)", text, re.MULTILINE)
    (base,) = re.findall(r"^FROM (\S+)$", text, re.MULTILINE)
    assert re.fullmatch(r"python:[\w.-]+@sha256:[0-9a-f]{64}|\$\{IMAGE\}", base)
    assert re.search(r'^CMD \["meshtune"', text, re.MULTILINE)
    assert f"-f docker/{path.name}" in text.splitlines()[0] + text.splitlines()[1]


@pytest.mark.parametrize("name", ["compose.yml", "compose.gpu.yml"])
def test_a_service_of_compose_has_a_health_check_and_listens_on_this_machine(name):
    services = yaml.safe_load((ROOT / "docker" / name).read_text())["services"]
    assert set(services) == {"board", "serve"}
    for service in services.values() if name == "compose.yml" else ():
        assert service["command"][0] == "meshtune"
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        port = service["command"][service["command"].index("--port") + 1]
        assert f"http://127.0.0.1:{port}/" in service["healthcheck"]["test"][-1]


@pytest.mark.parametrize("path", sorted((ROOT / "docker").glob("requirements-*.txt")), ids=lambda path: path.name)
def test_every_package_of_an_image_has_its_hash_and_the_version_that_is_tested(path: pathlib.Path):
    lines = path.read_text().splitlines()[1:]
    locked = dict(re.fullmatch(r"(\S+)==(\S+) --hash=sha256:[0-9a-f]{64}", line).groups() for line in lines)
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert len(locked) > 100
    assert {"jax", "transformers", "starlette", "hatchling"} <= {name.lower() for name in locked}
    assert {name: version for name, version in locked.items() if pins.get(name, version) != version} == {}
    readers = [file for file in FILES if f"docker/{path.name}" in file.read_text()]
    assert readers
