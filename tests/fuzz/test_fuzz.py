"""Files that nobody would write, at every reader of strangers' files: a result or a sentence, soon, in little memory.

`make test-fuzz SEED=7` takes other cases; `python tests/fuzz/fuzz.py READER SEED CASES SECONDS` runs some by hand.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from fuzz import READERS

PROGRAM = pathlib.Path(__file__).with_name("fuzz.py")
SEED = os.environ.get("MESHTUNE_FUZZ_SEED", "0")
SECONDS = 100  # for each reader; two run at once


def failures(readers: str, cases: int, seconds: float) -> list[str]:
    """Lists failures, in a separate process: a reader may take all memory, or end the interpreter."""
    root = pathlib.Path(__file__).parents[2]
    paths = [str(root / "src"), str(root / "tests"), str(root / "tests/families")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(PROGRAM), readers, SEED, str(cases), str(seconds)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    wrong = [f"{line['reader']} {line['case']}: {line['wrong']}" for line in lines if "wrong" in line]
    if done.returncode:
        wrong.append(f"{lines[-1] if lines else 'before the first case'}: exit {done.returncode}, {done.stderr[-500:]}")
    return wrong


def test_some_files_of_every_kind():
    assert failures(",".join(READERS), 5, 30) == []


@pytest.mark.fuzz
@pytest.mark.parametrize("reader", READERS)
def test_many_files_of_a_kind(reader: str):
    assert failures(reader, 10**6, SECONDS) == []
