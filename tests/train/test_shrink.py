"""Whole runs in too little memory (`ulimit -v`): refused, explained where they run out, or made smaller."""

from __future__ import annotations

import json
import pathlib
import re
import resource
import subprocess
import sys

import pytest
from real_runs import environment

import meshtune

QUICKSTART = pathlib.Path(meshtune.__file__).parent / "quickstart"
GIB = 2**30


def train(folder: pathlib.Path, output: str, *changes: str, memory: float | None = None):
    """(exit code, output) of a run in `memory` GiB of address space."""
    limit = None if memory is None else (int(memory * GIB),) * 2
    recipe = [
        f"model={QUICKSTART / 'model'}", f"data.train={QUICKSTART / 'lesson.jsonl'}", "data.max_length=256",
        f"output={folder / output}", "train.steps=1", "train.batch_size=1024", "compute.remat=selective",
        "optimizer.warmup_steps=0", *changes,
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "meshtune", "train", *recipe],
        env=environment(folder / "cache"),
        capture_output=True,
        text=True,
        timeout=1200,
        preexec_fn=None if limit is None else lambda: resource.setrlimit(resource.RLIMIT_AS, limit),
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_batch_that_does_not_fit_is_refused_and_the_offered_micro_batch_runs(tmp_path):
    """That its result is the same is test_step.test_micro_batches_equal_one_big_batch."""
    code, log = train(tmp_path, "refused", memory=5)
    assert code == 2
    assert "are free" in log
    assert "loaded" not in log, "nothing is loaded before"
    assert not (tmp_path / "refused").exists()
    change = re.search(r"fix: (train\.micro_batch=\d+) is expected to fit", log)
    assert change, log
    code, log = train(tmp_path, "smaller", change[1], memory=5)
    assert code == 0, log


@pytest.mark.slow
def test_memory_that_runs_out_while_a_step_runs_is_explained_and_each_fix_is_a_change_that_runs(tmp_path):
    code, log = train(tmp_path, "ran-out", "compute.memory_check=false", memory=5)
    assert code == 2
    assert "this is not expected to fit" in log
    assert "the device has no room for another" in log
    assert "defect" not in log
    change = re.search(r"train\.micro_batch=\d+", log.partition("fix:")[2])
    assert change, log
    code, log = train(tmp_path, "ran-out", "compute.memory_check=false", "overwrite=true", change[0], memory=5)
    assert code == 0, log


@pytest.mark.slow
def test_an_open_micro_batch_is_made_smaller_until_it_fits(tmp_path):
    """By the estimate, and without it when the first update runs out; what it became is in the recipe of the run."""
    for output, overrides in (("estimated", ()), ("ran-out", ("compute.memory_check=false",))):
        code, log = train(tmp_path, output, "train.micro_batch=auto", *overrides, memory=5)
        assert code == 0, log
        assert "trying a micro-batch of 512 rows" in log
        rows = [json.loads(line) for line in (tmp_path / output / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == [1]
        assert "micro_batch: 512" in (tmp_path / output / "recipe.yaml").read_text()
    code, log = train(tmp_path, "ran-out", "train.micro_batch=auto", "resume=true")
    assert code == 0, "a resumed run takes the micro-batch that it had: " + log
