"""Samples memory, utilisation, power and temperature of this process's devices.

Memory comes from JAX; the rest from `nvidia-ml-py` or AMD's `amdsmi` where installed. A reading takes milliseconds: a
few driver calls per device.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from meshtune.mesh.accelerators import VISIBLE_DEVICE_VARIABLES

Reading = dict[str, float]


class DeviceMetrics:
    """Reads this process's devices; keys are prefixed by the local device index, as in `device0_memory`.

    `memory` and `peak_memory` are bytes, `utilization` percent, `power` watts, `temperature` degrees Celsius.
    """

    def __init__(self, env: Mapping[str, str] = os.environ):
        self._devices = jax.local_devices()
        self._gpus: list[Callable[[], Reading]] = []
        if self._devices[0].platform in ("gpu", "cuda", "rocm"):
            readers = _nvidia() or _amd()
            self._gpus = [readers[number] for number in physical(self._devices, env) if number < len(readers)]

    def read(self) -> Reading:
        """Returns the current figures; empty on CPUs, which report none."""
        figures: Reading = {}
        for number, device in enumerate(self._devices):
            stats = device.memory_stats() or {}
            for name, key in (("memory", "bytes_in_use"), ("peak_memory", "peak_bytes_in_use")):
                if key in stats:
                    figures[f"device{number}_{name}"] = float(stats[key])
        for number, gpu in enumerate(self._gpus):
            figures |= {f"device{number}_{name}": value for name, value in gpu().items()}
        return figures


def physical(devices: Sequence[jax.Device], env: Mapping[str, str] = os.environ) -> list[int]:
    """Returns the driver's indices of `devices`: drivers count all devices of a machine, JAX the visible ones."""
    shown = next((env[name] for name in VISIBLE_DEVICE_VARIABLES if name in env), "")
    numbers = [int(word) for word in shown.split(",") if word.strip().isdigit()]
    reported = [getattr(device, "local_hardware_id", None) for device in devices]
    local_ids = [index if number is None else number for index, number in enumerate(reported)]
    return [numbers[number] if number < len(numbers) else number for number in local_ids]


def _nvidia() -> list[Callable[[], Reading]]:
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return []
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return []

    def reader(handle: Any) -> Callable[[], Reading]:
        def read() -> Reading:
            figures: Reading = {}
            with contextlib.suppress(nvml.NVMLError):  # not every card reports every figure
                figures["utilization"] = float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
            with contextlib.suppress(nvml.NVMLError):
                figures["power"] = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
            with contextlib.suppress(nvml.NVMLError):
                figures["temperature"] = float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
            return figures

        return read

    return [reader(handle) for handle in handles]


def _amd() -> list[Callable[[], Reading]]:
    try:
        smi = importlib.import_module("amdsmi")
    except (ImportError, KeyError, OSError):  # importing amdsmi locates its library by a variable
        return []
    try:
        smi.amdsmi_init()
        handles = smi.amdsmi_get_processor_handles()
    except smi.AmdSmiException:
        return []

    def reader(handle: Any) -> Callable[[], Reading]:
        def read() -> Reading:
            figures: Reading = {}
            with contextlib.suppress(smi.AmdSmiException):
                figures |= _number("utilization", smi.amdsmi_get_gpu_activity(handle).get("gfx_activity"))
            with contextlib.suppress(smi.AmdSmiException):
                power = smi.amdsmi_get_power_info(handle)
                current = _number("power", power.get("current_socket_power"))
                figures |= current or _number("power", power.get("average_socket_power"))
            with contextlib.suppress(smi.AmdSmiException):
                sensor, metric = smi.AmdSmiTemperatureType.HOTSPOT, smi.AmdSmiTemperatureMetric.CURRENT
                figures |= _number("temperature", smi.amdsmi_get_temp_metric(handle, sensor, metric))
            return figures

        return read

    return [reader(handle) for handle in handles]


def _number(name: str, value: Any) -> Reading:
    """Returns {name: value}, or {} for the 'N/A' of figures that a card does not report."""
    return {name: float(value)} if isinstance(value, int | float) else {}
