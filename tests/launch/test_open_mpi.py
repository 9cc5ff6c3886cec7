"""Processes that mpirun starts join one job."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

JOB_PROCESS = pathlib.Path(__file__).parents[1] / "mesh/job_process.py"


@pytest.mark.slow
def test_processes_started_by_mpirun_join_one_job(tmp_path: pathlib.Path):
    if shutil.which("mpirun") is None:
        pytest.skip("needs Open MPI (apt-get install openmpi-bin)")
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, str(JOB_PROCESS), "short"]
    done = subprocess.run(
        command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('{"devices": 2, "local": 1}') == 2
