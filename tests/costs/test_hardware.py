"""Parsing of targets, and descriptions of devices."""

from __future__ import annotations

import pathlib

import pytest

from meshtune.costs.hardware import find_target, known_devices
from meshtune.errors import UserError
from meshtune.plan.compilers.topology import target_config


@pytest.mark.parametrize(
    ("text", "hosts", "per_host", "name"),
    [
        ("8xMI300X", 1, 8, "MI300X"),
        ("2x8xA100-80", 2, 8, "A100-80"),
        ("h200", 1, 1, "H200"),
        ("4xtpuv5p", 1, 4, "TPUv5p"),
        ("gfx906-16", 1, 1, "gfx906-16"),
        ("RX 9070 XT", 1, 1, "RX9070XT"),
        ("nvidia geforce rtx 4090", 1, 1, "RTX4090"),
        ("2xRadeon RX 7900 XTX", 1, 2, "RX7900XTX"),
        ("NVIDIA GB10", 1, 1, "DGXSpark"),
        ("strix halo", 1, 1, "StrixHalo-128"),
        ("M4-24", 1, 1, "M4-24"),
    ],
)
def test_a_target_is_hosts_times_devices_of_a_type(text, hosts, per_host, name):
    target = find_target(text, env={})
    assert (target.hosts, target.per_host, target.device.name) == (hosts, per_host, name)
    assert target.devices == hosts * per_host


def test_an_unknown_device_type_is_refused_with_near_names():
    with pytest.raises(UserError, match="no device is called 'M300X'") as caught:
        find_target("8xM300X", env={})
    assert "MI300X" in (caught.value.fix or "").split(";")[0]


def test_a_device_in_several_sizes_is_refused_with_their_names():
    with pytest.raises(UserError, match="no device is called 'M4 Pro'") as caught:
        find_target("M4 Pro", env={})
    assert "'M4Pro-24' or 'M4Pro-48' or 'M4Pro-64'? " in (caught.value.fix or "")


def test_a_macs_memory_is_what_metal_gives_to_programs(tmp_path):
    devices = known_devices({})
    assert (devices["M4-24"].memory, devices["M4Max-128"].memory) == (16 * 2**30, 96 * 2**30)
    assert all(device.unified for device in devices.values() if device.platform == "metal")
    file = tmp_path / "own.toml"
    file.write_text('[Mine]\nplatform = "metal"\nmemory_gib = 8\nsizes_gib = [8]\n')
    with pytest.raises(UserError, match="in place of memory_gib"):
        known_devices({"MESHTUNE_HARDWARE": str(file)})


@pytest.mark.parametrize("text", ["", "8x", "x8", "8*H100", "0xH100", "8x0xH100"])
def test_an_invalid_target_is_refused(text):
    with pytest.raises(UserError):
        find_target(text, env={})


def test_a_users_file_adds_devices_and_replaces_them(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text('[Mine]\nplatform = "rocm"\nmemory_gib = 12\n[H200]\nplatform = "cuda"\nmemory_gib = 100\n')
    env = {"MESHTUNE_HARDWARE": str(file)}
    assert find_target("2xMine", env).device.memory == 12 * 2**30
    assert known_devices(env)["H200"].memory == 100 * 2**30
    assert known_devices({})["H200"].memory == 141 * 2**30


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[Mine", "not valid TOML"),
        ("[Mine]\nmemory_gib = 12\n", "needs a platform"),
        ('[Mine]\nplatform = "cuda"\nmemory_gib = -1\n', "memory_gib"),
        ('[Mine]\nplatform = "cuda"\n', "memory_gib"),
    ],
)
def test_a_file_that_does_not_describe_devices_is_refused_by_name(tmp_path, text, message):
    file = tmp_path / "own.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        known_devices({"MESHTUNE_HARDWARE": str(file)})
    assert str(file) in (caught.value.where or "")


def test_a_missing_file_is_refused():
    with pytest.raises(UserError, match="there is no file"):
        known_devices({"MESHTUNE_HARDWARE": "/nowhere/own.toml"})


def test_the_device_in_the_documentation_is_valid(tmp_path):
    page = pathlib.Path(__file__).resolve().parents[2] / "docs/compilers.md"
    (tmp_path / "own.toml").write_text(page.read_text(encoding="utf-8").split("```toml\n")[1].split("```")[0])
    device = find_target("4xMyCard", {"MESHTUNE_HARDWARE": str(tmp_path / "own.toml")}).device
    assert device.shared_memory == (49152, 101376, 102400)
    assert "cuda_compute_capability { major: 8 minor: 9" in target_config(device)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("clock_gzh = 1.0", "did you mean 'clock_ghz'"),
        ("cores = 1.5", "cores = 1.5 is not a positive integer"),
        ("shared_memory = 3", "is not a list of positive integers"),
        ("bandwidth = -1", "is not a positive number"),
        ("arch = 90", "is not a string"),
    ],
)
def test_an_invalid_property_is_refused_with_the_expected_form(tmp_path, line, message):
    file = tmp_path / "own.toml"
    file.write_text(f'[Mine]\nplatform = "cuda"\nmemory_gib = 8\n{line}\n')
    with pytest.raises(UserError) as caught:
        known_devices({"MESHTUNE_HARDWARE": str(file)})
    assert message in str(caught.value)
    assert "[Mine]" in (caught.value.where or "")
