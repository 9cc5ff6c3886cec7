"""Checks the selected attention kernels on this kind of device before the first step."""

from __future__ import annotations

from meshtune.cache import cache_folder
from meshtune.kernels.attention import choose_backend
from meshtune.kernels.attention.self_check import self_check
from meshtune.model.compute import Compute
from meshtune.model.spec import ModelSpec
from meshtune.setup.choices import attention_requests


def checked_attention(compute: Compute, spec: ModelSpec, rows: int, length: int) -> list[str]:
    """A line for each kernel: compared now, or by an earlier run on this kind of device (in the user's cache).

    Raises: UserError where a kernel's numbers are wrong, with the way around it.
    """
    lines = []
    for request in attention_requests(compute, spec, rows, length):
        report = self_check(request, choose_backend(request, compute.attention)[0], cache_folder() / "attention-checks")
        if report is not None:
            lines.append(f"attention: {report}")
    return list(dict.fromkeys(lines))
