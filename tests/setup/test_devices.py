"""The devices of a job: the table, the check against the mesh, and what they do meanwhile."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
from rich.console import Console

from meshtune.errors import UserError
from meshtune.mesh.processes import Job
from meshtune.mesh.rendezvous import ProcessInfo
from meshtune.setup.machine import ProcessDevices, check_devices, device_table, gather_devices, platform_named
from meshtune.train.report import metrics_log


def gpus(*counts: int, per_host: int = 1) -> list[ProcessDevices]:
    return [
        ProcessDevices(number, f"node{number // per_host}", "gpu", "NVIDIA H100", count, "79.1 GiB")
        for number, count in enumerate(counts)
    ]


def show_devices(processes: list[ProcessDevices]) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(device_table(processes))
    return console.export_text()


def test_the_table_has_a_row_for_each_host():
    text = show_devices(gpus(4, 4, 4, 4, per_host=2))
    assert next(line for line in text.splitlines() if "node0" in line).split("│")[1:6] == [
        " node0 ",
        " 0-1       ",
        " gpu     ",
        " NVIDIA H100 ",
        "     8 ",
    ]
    assert "16 devices, 4 processes, 2 host(s)" in text


def test_only_as_many_devices_as_the_mesh_needs_pass():
    check_devices(gpus(8, 8), 16, mesh="dp=2 x fsdp=8")
    for count in (7, 9):
        with pytest.raises(UserError, match=f"needs 16 devices, and the job has {8 + count}\n"):
            check_devices(gpus(8, count), 16, mesh="dp=2 x fsdp=8")


def test_slurm_processes_that_see_one_gpu_each_hear_which_option_does_that():
    with pytest.raises(UserError) as error:
        check_devices(gpus(1, 1), 16, mesh="dp=2 x fsdp=8", launcher="Slurm")
    assert error.value.what == "the mesh dp=2 x fsdp=8 needs 16 devices, and the job has 2"
    assert error.value.where == "process 0 on node0: 1 x NVIDIA H100; process 1 on node1: 1 x NVIDIA H100"
    assert error.value.fix is not None
    assert "--gpus-per-task=1" in error.value.fix
    assert "--gpus-per-node=8 --ntasks-per-node=1" in error.value.fix


def test_too_many_devices_and_cpus_have_their_own_advice():
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES"):
        check_devices(gpus(8), 4, mesh="fsdp=4")
    with pytest.raises(UserError, match="meshtune launch local --devices 4"):
        check_devices([ProcessDevices(0, "here", "cpu", "x86_64", 1, "8 GiB")], 4, mesh="fsdp=4")


def test_a_process_alone_sees_itself():
    (process,) = gather_devices(Job(ProcessInfo()))
    assert (process.index, process.platform, process.count) == (0, "cpu", 1)


class Device:
    platform = "gpu"

    def __init__(self, hardware: int):
        self.local_hardware_id = hardware

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_in_use": 5, "peak_bytes_in_use": 9}


class NvmlError(Exception):
    pass


def nvml(**functions: Any) -> types.ModuleType:
    def temperature(handle: int, kind: int) -> int:
        raise NvmlError  # a card that does not tell

    module = types.ModuleType("pynvml")
    vars(module).update(
        NVMLError=NvmlError,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 8,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetUtilizationRates=lambda handle: types.SimpleNamespace(gpu=10 * handle),
        nvmlDeviceGetPowerUsage=lambda handle: 1000 * handle,
        nvmlDeviceGetTemperature=temperature,
        **functions,
    )
    return module


def test_nvidias_figures_are_those_of_the_visible_cards(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    monkeypatch.setattr(metrics_log.jax, "local_devices", lambda: [Device(0), Device(1)])
    metrics = metrics_log.DeviceMetrics({"CUDA_VISIBLE_DEVICES": "6,3"}).read()
    assert metrics == {
        "device0_memory": 5.0,
        "device0_peak_memory": 9.0,
        "device1_memory": 5.0,
        "device1_peak_memory": 9.0,
        "device0_utilization": 60.0,
        "device0_power": 6.0,
        "device1_utilization": 30.0,
        "device1_power": 3.0,
    }


def test_without_a_drivers_package_memory_is_still_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    monkeypatch.setattr(metrics_log.jax, "local_devices", lambda: [Device(0)])
    assert metrics_log.DeviceMetrics({}).read() == {"device0_memory": 5.0, "device0_peak_memory": 9.0}


def test_a_cpu_has_no_figures():
    assert metrics_log.DeviceMetrics().read() == {}


@pytest.mark.parametrize(
    ("backend", "version", "platform"),
    [
        ("cpu", "<unknown>", "cpu"),
        ("tpu", "libtpu 0.0.30", "tpu"),
        ("gpu", "PJRT C API\ncuda 12090", "cuda"),
        ("gpu", "PJRT C API\nrocm 70000", "rocm"),
        ("gpu", "PJRT C API\nsycl 1.6", "oneapi"),
        ("oneapi", "PJRT C API", "oneapi"),
        ("mps", "MPS 0.11.1", "metal"),
        ("METAL", "metaljax", "metal"),
        ("neuron", "", "neuron"),
    ],
)
def test_a_platform_is_known_by_the_names_of_its_plugins(backend, version, platform):
    assert platform_named(backend, version) == platform
