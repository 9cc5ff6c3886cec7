"""Checks of `meshtune doctor`: plugins, rivals, old drivers, memory that is taken, known faults."""

from __future__ import annotations

import json

import pytest

import command
from meshtune.costs.hardware import find_device, known_devices
from meshtune.setup import card
from meshtune.setup.card import diagnose, known_faults, known_plugins

DEVICES = known_devices({})


def findings(name, installed=(), *, attached=False):
    versions = {"jaxlib": "0.11.2"} | dict(installed)
    device = find_device(name, DEVICES)
    assert device is not None
    diagnosis = diagnose(device, attached=attached, version=versions.get)
    return {finding.about: finding for finding in diagnosis.findings}, diagnosis.next


@pytest.mark.parametrize("name", [name for name in DEVICES if name not in ("gfx906-16", "CPU")])
def test_every_device_has_a_plugin_that_serves_it(name):
    assert any(plugin.serves(DEVICES[name]) for plugin in known_plugins())


def test_a_device_that_no_plugin_serves_says_why():
    report, following = findings("gfx906-16")
    assert report["plugin"].state == "bad"
    assert "no matrix products" in report["known fault"].text
    assert following == "choose another device"


@pytest.mark.parametrize(
    ("name", "extra"), [("T4", "cuda13"), ("V100-16", "cuda12"), ("RX 9070 XT", "rocm7"), ("TPUv5e", "tpu")]
)
def test_a_missing_plugin_comes_with_its_command(name, extra):
    report, following = findings(name)
    assert report["plugin"].state == "bad"
    assert f"'.[{extra}]'" in following


def test_a_plugin_that_fits_is_ready():
    report, following = findings("RX 7900 XTX", {"jax-rocm7-plugin": "0.11.2"})
    assert (report["plugin"].state, following) == ("good", "")


def test_a_plugin_of_another_jax_is_replaced():
    report, following = findings("RX 7900 XTX", {"jax-rocm7-plugin": "0.12.0"})
    assert "0.12.0 cannot work with jaxlib 0.11.2" in report["plugin"].text
    assert following == "pip install 'jax-rocm7-plugin==0.11.2'"


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [("RTX 4090", "jax-cuda13-plugin", "jax-cuda12-plugin"), ("M4-24", "metaljax", "jax-mps")],
)
def test_two_plugins_at_once_are_one_too_many(monkeypatch, name, first, second):
    monkeypatch.setattr(card.platform, "python_version", lambda: "3.12.1")
    report, following = findings(name, {first: "0.11.2", second: "0.11.2"})
    assert report["plugin"].state == "bad"
    assert following == f"pip uninstall {second}"


def test_an_old_python_comes_before_the_plugin(monkeypatch):
    monkeypatch.setattr(card.platform, "python_version", lambda: "3.11.7")
    report, following = findings("Arc B580")
    assert report["Python"].state == "bad"
    assert following == "make an environment with Python 3.12"


@pytest.mark.parametrize(
    ("driver", "used", "bad"), [("520.12", "300", "driver"), ("580.95", "9000", "memory"), ("580.95", "300", "")]
)
def test_an_old_driver_and_a_full_card_are_seen(monkeypatch, driver, used, bad):
    monkeypatch.setattr(card, "_nvidia", {"driver_version": driver, "memory.used": used}.get)
    report, _ = findings("RTX 4090", {"jax-cuda13-plugin": "0.11.2"}, attached=True)
    assert [about for about in ("driver", "memory") if report[about].state == "bad"] == [bad] * bool(bad)


@pytest.mark.parametrize("installed", [{}, {"jax-cuda13-plugin": "0.11.2"}])
def test_a_driver_that_is_too_old_for_one_plugin_takes_another(monkeypatch, installed):
    """Nobody can update the driver of Colab or Kaggle."""
    monkeypatch.setattr(card, "_nvidia", {"driver_version": "550.54", "memory.used": "3"}.get)
    report, following = findings("T4", installed, attached=True)
    assert "jax-cuda12-plugin is not installed" in report["plugin"].text
    assert report["driver"].state == "good"
    assert "'.[cuda12]'" in following


@pytest.mark.parametrize(
    ("name", "proof"),
    [("RTX4060Ti-16", "NVIDIA's compiler"), ("RX9070XT", "AMD's compiler"), ("Max1550", "nothing yet"),
     ("H200", "timed on one"), ("gfx906-16", "compiled as gfx90a"), ("TPUv4", "nothing yet")],
)  # fmt: skip
def test_a_proof_is_of_the_chip_itself(name, proof):
    assert proof in findings(name)[0]["proved"].text


def test_a_known_fault_is_told_for_its_release_and_chip():
    def remedies(name, release):
        return {fault.remedy for fault in known_faults(DEVICES[name], release)}

    assert remedies("RX9070XT", "7.12.1") == {"AMD_COMGR_NAMESPACE=1"}
    assert remedies("RX9070XT", "7.2.1") == set()
    assert remedies("RX9070XT", "7.2.0") == {"XLA_FLAGS=--xla_gpu_enable_command_buffer="}
    assert remedies("RX9070XT", "10.0.0") == set()
    assert remedies("W7900", "10.0.0") == {"XLA_FLAGS=--xla_gpu_enable_command_buffer="}
    assert all(fault.source for fault in known_faults(DEVICES["MI355X"], ""))


def test_the_command_ends_with_the_next_step():
    ran = command.run("doctor", "--target", "V100-32")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.rstrip().splitlines()[-1].startswith("next: ")
    report = json.loads(command.run("doctor", "--target", "V100-32", "--json").stdout)
    assert report["name"] == "V100-32"
    assert not report["ready"]


def test_an_unknown_card_is_answered_by_the_nearest():
    ran = command.run("doctor", "--target", "RTX 3065")
    assert ran.returncode == 2
    assert "did you mean 'RTX3060'?" in ran.stderr


def test_ascend_is_refused_with_what_to_use():
    ran = command.run("doctor", "--target", "Ascend 910B")
    assert ran.returncode == 2
    assert "LLaMA-Factory" in ran.stderr
