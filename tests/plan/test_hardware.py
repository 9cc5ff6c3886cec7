"""Targets in words, and the devices they name."""

from __future__ import annotations

import pathlib

import pytest

from meshtune.errors import UserError
from meshtune.plan.compilers.gpu_description import target_config
from meshtune.plan.hardware import find_target, known_devices


@pytest.mark.parametrize(
    ("words", "hosts", "each", "name"),
    [
        ("8xMI300X", 1, 8, "MI300X"),
        ("2x8xA100-80", 2, 8, "A100-80"),
        ("h200", 1, 1, "H200"),
        ("4xtpuv5p", 1, 4, "TPUv5p"),
        ("gfx906-16", 1, 1, "gfx906-16"),
    ],
)
def test_a_target_is_hosts_times_devices_of_a_kind(words, hosts, each, name):
    target = find_target(words, env={})
    assert (target.hosts, target.each, target.device.name) == (hosts, each, name)
    assert target.devices == hosts * each


def test_a_kind_that_nothing_describes_is_refused_with_near_names():
    with pytest.raises(UserError, match="no device is called 'M300X'") as caught:
        find_target("8xM300X", env={})
    assert "MI300X" in (caught.value.fix or "").split(";")[0]


@pytest.mark.parametrize("words", ["", "8x", "x8", "8*H100", "0xH100", "8x0xH100"])
def test_what_is_no_target_is_refused(words):
    with pytest.raises(UserError):
        find_target(words, env={})


def test_a_file_of_ones_own_adds_devices_and_replaces_them(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text('[Mine]\nplatform = "rocm"\nmemory_gib = 12\n[H200]\nplatform = "cuda"\nmemory_gib = 100\n')
    env = {"MESHTUNE_HARDWARE": str(own)}
    assert find_target("2xMine", env).device.memory == 12 * 2**30
    assert known_devices(env)["H200"].memory == 100 * 2**30
    assert known_devices({})["H200"].memory == 141 * 2**30


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[Mine", "not TOML"),
        ("[Mine]\nmemory_gib = 12\n", "needs a platform"),
        ('[Mine]\nplatform = "cuda"\nmemory_gib = -1\n', "memory_gib"),
        ('[Mine]\nplatform = "cuda"\n', "memory_gib"),
    ],
)
def test_a_file_that_does_not_describe_devices_is_refused_by_name(tmp_path, text, says):
    own = tmp_path / "own.toml"
    own.write_text(text)
    with pytest.raises(UserError, match=says) as caught:
        known_devices({"MESHTUNE_HARDWARE": str(own)})
    assert str(own) in (caught.value.where or "")


def test_a_file_that_is_not_there_is_refused():
    with pytest.raises(UserError, match="there is no file"):
        known_devices({"MESHTUNE_HARDWARE": "/nowhere/own.toml"})


def test_the_device_that_the_page_describes_is_one(tmp_path):
    page = pathlib.Path(__file__).resolve().parents[2] / "docs/compilers.md"
    (tmp_path / "own.toml").write_text(page.read_text(encoding="utf-8").split("```toml\n")[1].split("```")[0])
    device = find_target("4xMyCard", {"MESHTUNE_HARDWARE": str(tmp_path / "own.toml")}).device
    assert device.shared_memory == (49152, 101376, 102400)
    assert "cuda_compute_capability { major: 8 minor: 9" in target_config(device)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("clock_gzh = 1.0", "did you mean 'clock_ghz'"),
        ("cores = 1.5", "cores = 1.5 is not a whole number"),
        ("shared_memory = 3", "is not a list of whole numbers"),
        ("bandwidth = -1", "is not a number above 0"),
        ("arch = 90", "is not a text"),
    ],
)
def test_a_fact_that_is_none_is_refused_with_its_form(tmp_path, line, says):
    own = tmp_path / "own.toml"
    own.write_text(f'[Mine]\nplatform = "cuda"\nmemory_gib = 8\n{line}\n')
    with pytest.raises(UserError) as caught:
        known_devices({"MESHTUNE_HARDWARE": str(own)})
    assert says in str(caught.value)
    assert "[Mine]" in (caught.value.where or "")
