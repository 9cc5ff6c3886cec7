"""Which devices a job sees."""

from __future__ import annotations

import pytest

from meshtune.board import devices
from meshtune.board.devices import Device, checked_choice, devices_of, environment
from meshtune.errors import UserError


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = (Device("cuda:0", "A"), Device("cuda:1", "B"), Device("tpu:0", "T"), Device("cpu", "C"))
    monkeypatch.setattr(devices, "devices", lambda: listed)


def test_the_environment_shows_a_job_what_was_chosen():
    assert environment({"keys": ["cuda:1"]}, {})["CUDA_VISIBLE_DEVICES"] == "1"
    assert environment({"keys": ["cuda:0", "cuda:1"]}, {"CUDA_VISIBLE_DEVICES": "4,6"})["CUDA_VISIBLE_DEVICES"] == "4,6"
    assert environment({"keys": ["rocm:1"]}, {})["HIP_VISIBLE_DEVICES"] == "1"
    assert environment({"keys": ["rocm:1"]}, {"ROCR_VISIBLE_DEVICES": "2, 5"})["ROCR_VISIBLE_DEVICES"] == "5"
    tpu = environment({"keys": ["tpu:0", "tpu:1"]}, {})
    assert (tpu["TPU_VISIBLE_CHIPS"], tpu["TPU_CHIPS_PER_PROCESS_BOUNDS"]) == ("0,1", "1,2,1")
    cpu = environment({"keys": ["cpu"], "count": 4}, {"XLA_FLAGS": "--a --xla_force_host_platform_device_count=2"})
    assert (cpu["JAX_PLATFORMS"], cpu["XLA_FLAGS"]) == ("cpu", "--a --xla_force_host_platform_device_count=4")
    assert environment({}, {"A": "b"}) == {"A": "b"}


def test_a_choice_takes_devices_of_this_machine(two_gpus):
    assert devices_of({}) == {"cuda:0", "cuda:1", "tpu:0"}
    assert devices_of({"keys": ["cuda:1"]}) == {"cuda:1"}
    assert checked_choice({"keys": ["cuda:0"]}) == {"keys": ["cuda:0"]}
    for wrong in ({"keys": ["cuda:7"]}, {"keys": ["cuda:0", "cpu"]}, {"count": 0}, {"processes": True}, {"x": 1}, [1]):
        with pytest.raises(UserError):
            checked_choice(wrong)
