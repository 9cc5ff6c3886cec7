"""The compiler process: loads one platform's compiler and calls one function with a target's described devices.

`process.run` starts it as `python -m meshtune.plan.compilers.child JOB.json`.
"""

from __future__ import annotations

import importlib
import json
import pathlib
import sys
import types

from meshtune.costs.hardware import Target, device_from_json
from meshtune.errors import UserError
from meshtune.plan.compilers.topology import described_devices

# Plugins of other platforms in the same environment must not be loaded: JAX initialises every plugin that it finds, and
# the symbols of two of XLA's compilers clash in one process.
PLUGINS = {
    "cuda": ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"),
    "rocm": ("jax_plugins.xla_rocm7", "jax_plugins.xla_rocm8"),
    "oneapi": ("jax_plugins.xla_oneapi",),
}


def main(path: str) -> None:
    job = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    target = Target(job["hosts"], job["per_host"], device_from_json(job["device"]))
    isolate(target.device.platform)
    answer: dict[str, object]
    try:
        devices = described_devices(target)
        module, _, name = job["function"].partition(":")
        answer = {"result": getattr(importlib.import_module(module), name)(target, devices, **job["arguments"])}
    except UserError as error:
        answer = {"error": {"what": error.what, "where": error.where, "fix": error.fix}}
    pathlib.Path(job["answer"]).write_text(json.dumps(answer), encoding="utf-8")


def isolate(platform: str) -> None:
    """Hides the plugins of all other platforms, and lets ROCm's register on a machine without a GPU."""
    hidden = [name for owner, names in PLUGINS.items() if owner != platform for name in names]
    for name in hidden:
        sys.modules[name] = stub = types.ModuleType(name)
        stub.__dict__["initialize"] = lambda: None
    if platform != "tpu":
        sys.modules["libtpu"] = None  # pyright: ignore[reportArgumentType]  # importing it now raises ImportError
    if platform == "rocm":
        # JAX's ROCm plugin registers only if the kernel shows an AMD GPU, and has no public way to load its compiler
        # alone. Nothing is executed on a device in this process, so the faked count has no other effect.
        hardware = importlib.import_module("jax._src.hardware_utils")
        vars(hardware)["num_available_amd_gpus"] = lambda stop_at=None: 1


if __name__ == "__main__":
    main(sys.argv[1])
