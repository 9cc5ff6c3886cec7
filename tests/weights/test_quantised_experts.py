"""Experts whose scales are quantised too, from files that hold them together and one by one: as quantised whole."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import quantised_experts_cases

from families.case import directory
from families.cases import CASES


@pytest.mark.slow
@pytest.mark.parametrize("name", ["granitemoe", "qwen3_moe"])
def test_bits_are_those_of_the_whole_weight_on_one_device_and_on_meshes(name: str):
    case = next(case for case in CASES if case.name == name)
    program = [
        sys.executable,
        quantised_experts_cases.__file__,
        str(directory(case.changed(vocab_size=case.vocab_on_mesh))),
    ]
    run = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    different = json.loads(run.stdout.splitlines()[-1])
    assert len(different) == len(quantised_experts_cases.MESHES)
    assert not any(different.values()), different
