"""Processes that mpirun starts find each other."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

MEMBER = pathlib.Path(__file__).parents[1] / "mesh/job_member.py"


@pytest.mark.slow
def test_mpirun_starts_a_job(tmp_path: pathlib.Path):
    if shutil.which("mpirun") is None:
        pytest.skip("needs Open MPI (apt-get install openmpi-bin)")
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, str(MEMBER), "short"]
    done = subprocess.run(
        command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('{"devices": 2, "local": 1}') == 2
