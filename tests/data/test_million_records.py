"""A million records of two sources, planned and mixed by weight, packed and resumed, with none of them in memory."""

from __future__ import annotations

import json
import os
import pathlib
import random
import subprocess
import sys
from typing import Any

import pytest

PROGRAM = pathlib.Path(__file__).with_name("million_records.py")
PARTS = ["Tom", "Lily", "the dog", "a tree", "went", "was happy", "saw a cake", "home"]
FEW, MANY, STOP = 100_000, 1_000_000, 40
PER_RECORD = 80  # bytes at most: where it begins in its file, and its place in the mixture and in an epoch's order


def write(folder: pathlib.Path, count: int) -> pathlib.Path:
    """Some 200 bytes a record, three fifths of them in the source that is seen four times in five."""
    folder.mkdir()
    rng = random.Random(0)
    for name, share in (("often", 0.6), ("seldom", 0.4)):
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for number in range(int(count * share)):
                answer = " ".join(rng.choices(PARTS, k=2 + number % 7))
                record = {"prompt": f"{number} {rng.choice(PARTS)}?", "completion": answer, "note": "not read " * 12}
                file.write(json.dumps(record) + "\n")
    return folder


def read(folder: pathlib.Path, start: int, stop: int) -> dict[str, Any]:
    command = [sys.executable, str(PROGRAM), str(folder), str(start), str(stop)]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(pathlib.Path(__file__).parents[2] / "src")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="memory is read as Linux tells it")
def test_a_million_records_are_mixed_packed_and_resumed_in_memory_that_does_not_hold_them(tmp_path: pathlib.Path):
    few = read(write(tmp_path / "few", FEW), 0, STOP)
    folder = write(tmp_path / "many", MANY)
    many = read(folder, 0, STOP)
    assert many["samples"] == MANY
    total = sum(many["records"].values())
    assert total > 40_000
    assert many["records"]["often"] / total == pytest.approx(0.8, abs=0.01)
    assert many["distinct"] > 0.95 * total  # a third of the records seen often come again
    assert many["filled"] > 0.95
    assert few["distinct"] > 0.8 * sum(few["records"].values())
    assert many["memory"] - few["memory"] < PER_RECORD * (MANY - FEW)
    # A process that starts in the middle, from the journal, and one that has lost it.
    assert read(folder, STOP - 5, STOP)["hash"] == many["hash"]
    (folder / "run/stream.jsonl").unlink()
    assert read(folder, STOP - 5, STOP)["hash"] == many["hash"]
