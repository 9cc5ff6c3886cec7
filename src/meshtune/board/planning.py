"""A process that plans recipes: a JSON request a line on standard input, an answer a line on standard output.

`python -m meshtune.board.planning`. It stays warm between requests, since importing takes seconds and a quick plan
milliseconds, and ends with the board, or when nothing was asked for IDLE_SECONDS. JAX sees the CPU alone in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import select
import subprocess
from typing import Any

IDLE_SECONDS = 900.0
LOCAL = "here"
GPU_FLAGS = ["--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]


def main() -> None:
    """Answers requests until the input ends."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print does not mix with answers
    pending = b""
    while select.select([0], [], [], IDLE_SECONDS)[0]:
        part = os.read(0, 2**20)
        if not part:
            return
        pending += part
        *lines, pending = pending.split(b"\n")
        for line in lines:
            answers.write(json.dumps(answer(json.loads(line))) + "\n")
            answers.flush()


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The result of one request, {"plan": ...}, or {"problems": [...]}."""
    from meshtune.board.answers import problems_of
    from meshtune.board.planning_work import WORK

    try:
        return WORK[request["work"]](request)
    except Exception as error:  # the process answers whatever happens: the page shows it
        return {"problems": problems_of(error)}


def local_machine() -> Any:
    """This machine as a target of `meshtune plan`: its accelerators, else its CPU. Raises: UserError."""
    from meshtune.board.devices import CPU, devices
    from meshtune.costs.hardware import Target, known_devices
    from meshtune.errors import UserError

    accelerators = [device for device in devices() if device.key != CPU]
    if not accelerators:
        return _this_cpu()
    kinds = {device.kind.lower(): device for device in known_devices().values()}
    platform = accelerators[0].key.partition(":")[0]
    name = accelerators[0].name.partition(",")[0].lower()
    if platform == "cuda" and (memory := _nvidia_bytes()):
        cuda = [device for device in known_devices().values() if device.platform == "cuda"]
        closest = min(cuda, key=lambda device: abs(device.memory - memory))
        known = kinds.get(name) or dataclasses.replace(closest, name=accelerators[0].name.partition(",")[0])
        return Target(1, len(accelerators), dataclasses.replace(known, memory=memory))
    raise UserError(
        f"what these devices are is not known without starting them: {accelerators[0].name}",
        where="target",
        fix="choose a described machine, such as 8xMI300X",
    )


@functools.cache
def _this_cpu() -> Any:
    from meshtune.setup.machine import local_target, this_machine

    return local_target(this_machine())


def _nvidia_bytes() -> int:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired, ValueError):
        done = subprocess.run(["nvidia-smi", *GPU_FLAGS], capture_output=True, text=True, timeout=20)
        return int(done.stdout.splitlines()[0].rpartition(",")[2]) * 2**20
    return 0


if __name__ == "__main__":
    main()
