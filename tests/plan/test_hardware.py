"""Targets in words, and the devices they name."""

from __future__ import annotations

import pytest

from meshtune.errors import UserError
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
