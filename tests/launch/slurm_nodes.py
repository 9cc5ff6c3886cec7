"""A real Slurm for the tests: a controller and two node daemons on loopback, started by slurm_here.sh."""

from __future__ import annotations

import contextlib
import pathlib
import subprocess
from collections.abc import Iterator

import pytest

TOOL = str(pathlib.Path(__file__).with_name("slurm_here.sh"))


@contextlib.contextmanager
def two_nodes(folder: pathlib.Path) -> Iterator[dict[str, str]]:
    """The environment variables with which Slurm's commands reach the nodes, which keep their files in `folder`. Skips
    the test where Slurm cannot be installed."""
    installed = subprocess.run(["bash", TOOL, "install"], capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"slurm-wlm and munge cannot be installed: {installed.stderr.strip()[-200:]}")
    started = subprocess.run(["bash", TOOL, "start", str(folder)], capture_output=True, text=True, timeout=120)
    try:
        assert started.returncode == 0, started.stderr
        yield {"SLURM_CONF": str(folder / "slurm.conf")}
    finally:
        subprocess.run(["bash", TOOL, "stop", str(folder)], check=False)
