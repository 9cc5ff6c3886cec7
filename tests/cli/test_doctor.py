"""`meshtune doctor`: installed parts, missing parts and how to get them."""

from __future__ import annotations

import importlib.metadata
import json

import pytest

import command
from meshtune.errors import UserError
from meshtune.plan.compilers.find import install, requirements


def doctor(*arguments: str, **variables: str):
    return command.run("doctor", *arguments, **variables)


def test_every_compiler_that_is_missing_comes_with_the_way_to_get_it(tmp_path):
    ran = doctor(MESHTUNE_COMPILERS=str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    for platform, extra in (("cuda", "plan-cuda"), ("rocm", "plan-rocm"), ("tpu", "plan-tpu")):
        if f"{platform} XLA's compiler" in ran.stdout:  # it may be in the environment
            assert f"meshtune doctor --install {platform}" in ran.stdout
            assert f".[{extra}]" in ran.stdout
    assert "cpu: this CPU" in ran.stdout


def test_json_says_the_same_and_a_check_compiles(tmp_path):
    ran = doctor("--json", "--check", MESHTUNE_COMPILERS=str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert (report["device"]["name"], report["device"]["ready"]) == ("CPU", True)
    compilers = report["compilers"]
    assert list(compilers) == ["cuda", "rocm", "tpu", "oneapi", "cpu"]
    assert compilers["cpu"]["found"]
    assert compilers["cpu"]["compiles"]
    assert compilers["cpu"]["packages"] == {"jaxlib": importlib.metadata.version("jaxlib")}
    for platform in compilers.values():
        assert platform["found"] or (platform["reason"] and platform["fix"])


def test_a_platform_without_a_compiler_is_refused_before_anything_is_installed(tmp_path):
    ran = doctor("--install", "tpu", "--install", "rcom", MESHTUNE_COMPILERS=str(tmp_path))
    assert ran.returncode == 2
    assert "did you mean 'rocm'?" in ran.stderr
    assert list(tmp_path.iterdir()) == []


def test_plugins_are_asked_for_in_jaxs_own_version():
    version = importlib.metadata.version("jax")
    cuda = requirements("cuda")
    assert [line.split("=")[0].rstrip("<>") for line in cuda][:2] == ["jax-cuda12-plugin", "jax-cuda12-pjrt"]
    assert all(version in line for line in cuda[:2])
    assert cuda[2].startswith("nvidia-cuda-nvcc")
    # With libtpu it is jax that knows which of its versions goes with it.
    stated = [line for line in importlib.metadata.requires("jax") or [] if line.startswith("libtpu")]
    assert requirements("tpu") == [stated[0].split(";")[0].strip()]


def test_what_cannot_be_installed_leaves_what_was_there(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHTUNE_COMPILERS", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    monkeypatch.setenv("UV_OFFLINE", "1")
    (tmp_path / "tpu").mkdir()
    (tmp_path / "tpu/mark").touch()
    with pytest.raises(UserError, match="the compiler for tpu could not be installed"):
        install("tpu")
    assert [path.name for path in tmp_path.iterdir()] == ["tpu"]
    assert (tmp_path / "tpu/mark").exists()
