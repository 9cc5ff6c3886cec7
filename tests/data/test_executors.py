"""`meshtune data prepare`: shares that are started together or again, executors, and refusals."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import meshtune.quickstart
from data.preparing import records
from meshtune.cli.data import app
from meshtune.data.executors import PrepareShare
from meshtune.errors import UserError

MODEL = pathlib.Path(meshtune.quickstart.__file__).parent / "model"


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    """A recipe with 300 records, to be prepared into tmp_path / "cache"."""
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, records("sft", 300))))
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("meshtune.data.store.SHARD", 32)
    return [f"model.path={MODEL}", "model.chat_template=plain", f"data={tmp_path / 'data.jsonl'}", "output=out"]


def prepare(*arguments):
    return CliRunner().invoke(app, ["prepare", *arguments], catch_exceptions=False)


def files(cache: pathlib.Path) -> dict[str, bytes]:
    """The files of the only store of a cache."""
    (folder,) = (path.parent for path in cache.glob("tokens/*/manifest.json"))
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_shares_in_any_number_and_order_make_the_same_files(arguments, tmp_path, monkeypatch):
    shown = prepare(*arguments, "--workers", "1").output
    assert "train data: 300 documents" in shown
    expected = files(tmp_path / "cache")
    assert len(expected) == 10 + 2
    for shard in ("2/3", "1/1"):
        monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / shard.replace("/", "-")))
        assert prepare(*arguments, "--shard", shard, "--workers", "1").exit_code == 0
        assert files(tmp_path / shard.replace("/", "-")) == expected
    assert prepare(*arguments, "--shard", "3/3").output == shown  # nothing is left to do


def test_two_preparers_of_one_shard_and_one_of_another_make_the_same_files(arguments, tmp_path):
    """At once, as real commands; what one makes the others read."""
    prepare(*arguments, "--workers", "1")
    code = "import meshtune.data.store as s; s.SHARD = 32; from meshtune.cli.data import app; app()"
    command = [sys.executable, "-c", code, "prepare", *arguments, "--workers", "1", "--shard"]
    environment = os.environ | {"MESHTUNE_CACHE": str(tmp_path / "shared")}
    running = [
        subprocess.Popen(
            [*command, shard], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for shard in ("1/2", "1/2", "2/2")
    ]
    outputs = [process.communicate(timeout=300)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], outputs
    assert files(tmp_path / "shared") == files(tmp_path / "cache")


@pytest.mark.parametrize("shard", ["0/4", "5/4", "4", "1/0", "x/y"])
def test_a_shard_that_does_not_exist_is_refused(arguments, shard):
    with pytest.raises(UserError, match=f"no shard '{shard}'"):
        prepare(*arguments, "--shard", shard)


def test_a_stream_is_refused(arguments):
    with pytest.raises(UserError, match="tokenised during training"):
        prepare(*arguments, "data.streaming=true", "train.steps=5")


def test_executors_that_are_not_installed_are_named(arguments, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match="no sbatch"):
        prepare(*arguments, "--executor", "slurm")
    with pytest.raises(UserError, match=r"ray is not installed(.|\n)*\[ray\]"):
        prepare(*arguments, "--executor", "ray")
    with pytest.raises(UserError, match="leave --shard out"):
        prepare(*arguments, "--executor", "ray", "--shard", "1/2")


def fake_sbatch(folder: pathlib.Path, monkeypatch) -> None:
    """A program that says what sbatch does after it has accepted a job, and keeps its script."""
    folder.mkdir()
    (folder / "sbatch").write_text(
        f'#!/bin/sh\nfor last; do :; done\ncat "$last" >> {folder}/jobs\necho "Submitted batch job 17"\n'
    )
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_without_datatrove_the_extra_is_named(arguments, tmp_path, monkeypatch):
    fake_sbatch(tmp_path / "bin", monkeypatch)
    monkeypatch.setitem(sys.modules, "datatrove", None)
    with pytest.raises(UserError, match=r"datatrove, which is not installed(.|\n)*\[data\]"):
        prepare(*arguments, "--executor", "slurm")


def test_datatroves_slurm_executor_submits_an_array_of_the_shares(arguments, tmp_path, monkeypatch):
    pytest.importorskip("datatrove.executor.slurm")
    fake_sbatch(tmp_path / "bin", monkeypatch)
    with pytest.raises(UserError, match="--option partition=VALUE --option time=VALUE"):
        prepare(*arguments, "--executor", "slurm")
    options = ["partition=cpu", "time=10:00", "account=physics"]
    flags = [part for option in options for part in ("--option", option)]
    shown = prepare(*arguments, "--executor", "slurm", "--workers", "4", *flags).output
    assert "job 17 of Slurm" in " ".join(shown.split())
    script = (tmp_path / "bin/jobs").read_text()
    for line in ("--partition=cpu", "--time=10:00", "--account=physics", "--array=0-3%4", "launch_pickled_pipeline"):
        assert line in script


def test_datatroves_local_executor_runs_the_step(arguments, tmp_path, monkeypatch):
    """Its Slurm and Ray executors run the same step: ranks 0 and 1 of 2."""
    local = pytest.importorskip("datatrove.executor.local")
    prepare(*arguments, "--workers", "1")
    step = PrepareShare((None, arguments), str(tmp_path / "datatrove"))
    for _ in range(2):  # the second time there is nothing to do
        executor = local.LocalPipelineExecutor(
            [step], tasks=2, workers=1, logging_dir=str(tmp_path / "logs"), skip_completed=False
        )
        executor.run()
    assert files(tmp_path / "datatrove") == files(tmp_path / "cache")
