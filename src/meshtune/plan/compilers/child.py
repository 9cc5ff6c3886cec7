"""The process that compiles: one compiler, no accelerator, one function called with a target's described devices.

python -m meshtune.plan.compilers.child JOB.json, as `process.run` starts it.
"""

from __future__ import annotations

import importlib
import json
import pathlib
import sys
import types
from typing import Any

from meshtune.errors import UserError
from meshtune.plan.compilers.topology import described_devices
from meshtune.plan.hardware import Target, device_of

# A plugin of another platform in the same environment is never loaded: XLA's compilers share names that clash in one
# process, and JAX would start whatever it finds.
PLUGINS = {
    "cuda": ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"),
    "rocm": ("jax_plugins.xla_rocm7", "jax_plugins.xla_rocm8"),
}


def main(path: str) -> None:
    job = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    target = Target(job["hosts"], job["each"], device_of(job["device"]))
    prepare(target.device.platform)
    answer: dict[str, Any]
    try:
        devices = described_devices(target)
        module, _, name = job["function"].partition(":")
        answer = {"result": getattr(importlib.import_module(module), name)(target, devices, **job["arguments"])}
    except UserError as error:
        answer = {"error": {"what": error.what, "where": error.where, "fix": error.fix}}
    pathlib.Path(job["answer"]).write_text(json.dumps(answer), encoding="utf-8")


def prepare(platform: str) -> None:
    """Leaves only this platform's plugin to be found, and lets ROCm's register where there is no GPU."""
    for other in (name for owner, names in PLUGINS.items() if owner != platform for name in names):
        sys.modules[other] = empty = types.ModuleType(other)
        empty.__dict__["initialize"] = lambda: None
    if platform != "tpu":
        sys.modules["libtpu"] = None  # pyright: ignore[reportArgumentType]  # so importing it fails, as if not installed
    if platform == "rocm":
        # JAX's ROCm plugin registers only where the kernel shows an AMD GPU, and there is no public way to say that
        # its compiler alone is wanted. Nothing runs on a device here, so the count is never used for more than this.
        hardware = importlib.import_module("jax._src.hardware_utils")
        vars(hardware)["num_available_amd_gpus"] = lambda stop_at=None: 1


if __name__ == "__main__":
    main(sys.argv[1])
