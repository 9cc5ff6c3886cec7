"""Parts made by other processes: the same store, the same errors, and no process outlives the one that started it."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import time

import psutil
import pytest

from data.preparing import MODEL, contents, prepared, records
from meshtune.config.data_options import TokenOptions
from meshtune.data.conversation import Conversation, Message, Origin, Text
from meshtune.data.loader import PartTask, StageExamples
from meshtune.data.part_process import PartProcess, process_count
from meshtune.data.tokenizer import load_tokenizer
from meshtune.errors import UserError

STARTED = f"""
import sys, time
sys.path.insert(0, {str(pathlib.Path(__file__).parents[1])!r})
import meshtune.data.store, meshtune.data.tokenise
meshtune.data.store.PART = meshtune.data.tokenise.PART = 64
meshtune.data.tokenise.IN_PROCESS = 0
from data.preparing import prepared
prepared(*sys.argv[1:], "sft", lambda activity, done, of: time.sleep("tokenising" in activity and 0.5))
"""


@pytest.fixture
def processes(monkeypatch):
    monkeypatch.setattr("meshtune.data.store.PART", 64)
    monkeypatch.setattr("meshtune.data.tokenise.PART", 64)
    monkeypatch.setattr("meshtune.data.tokenise.IN_PROCESS", 0)
    monkeypatch.setenv("MESHTUNE_DATA_PROCESSES", "2")


@pytest.fixture
def started_pids(monkeypatch):
    """The processes that were started."""
    pids: list[int] = []
    popen = subprocess.Popen

    def record(command, **options):
        process = popen(command, **options)
        pids.append(process.pid)
        return process

    monkeypatch.setattr(subprocess, "Popen", record)
    return pids


@pytest.mark.parametrize("stage", ["dpo", *(pytest.param(stage, marks=pytest.mark.slow) for stage in ("sft", "kto"))])
def test_a_store_made_by_processes_is_the_one_made_by_threads(stage, tmp_path, processes, monkeypatch, started_pids):
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(map(json.dumps, records(stage, 300))))
    by_processes = prepared(file, tmp_path / "processes", stage)
    assert len(started_pids) == 2
    assert not any(map(psutil.pid_exists, started_pids))
    monkeypatch.setenv("MESHTUNE_DATA_PROCESSES", "1")
    assert contents(by_processes) == contents(prepared(file, tmp_path / "threads", stage))
    assert len(started_pids) == 2


def test_an_error_in_a_process_is_the_one_in_a_thread():
    task = PartTask(load_tokenizer(MODEL, "plain"), TokenOptions(16, overlong="error"), StageExamples("documents"))
    samples = [Conversation((Message("user", "x"), Message("assistant", "y " * 90)), Origin("data.jsonl", 7))]
    with pytest.raises(UserError) as expected:
        task.maker()(samples)
    with PartProcess(pickle.dumps(task)) as process:
        with pytest.raises(UserError) as raised:
            process(samples)
        assert str(raised.value) == str(expected.value)
        assert "record 7" in str(raised.value)
        assert len(process([Text("short", Origin("data.jsonl", 8))]).examples.lengths) == 1  # it goes on


def test_a_process_that_dies_is_said_to_have(started_pids):
    task = PartTask(load_tokenizer(MODEL, "plain"), TokenOptions(16), StageExamples("documents"))
    with PartProcess(pickle.dumps(task)) as process:
        os.kill(started_pids[0], signal.SIGKILL)
        with pytest.raises(UserError, match=r"ended with signal SIGKILL(.|\n)*MESHTUNE_DATA_PROCESSES"):
            process([Text("a", Origin("x", 0))])


def test_a_killed_preparation_ends_its_processes_and_goes_on_where_it_was(tmp_path, processes):
    file, cache = tmp_path / "data.jsonl", tmp_path / "cache"
    file.write_text("\n".join(map(json.dumps, records("sft", 1000))))
    first = subprocess.Popen([sys.executable, "-c", STARTED, str(file), str(cache)])
    deadline = time.monotonic() + 240
    while len(list(cache.glob("tokens/.parts-*/*.npz"))) < 3:
        assert first.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = psutil.Process(first.pid).children(recursive=True)
    assert len(children) == 2
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    psutil.wait_procs(children, timeout=60)
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    assert list(cache.glob("tokens/.parts-*/*.npz"))
    assert contents(prepared(file, cache, "sft")) == contents(prepared(file, tmp_path / "fresh", "sft"))


def test_a_process_imports_neither_jax_nor_the_program_that_starts_it():
    script = "import meshtune.data.part_process, sys; sys.exit('jax' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


@pytest.mark.parametrize(("value", "count"), [("1", 1), ("12", 12), ("0", None), ("many", None)])
def test_the_number_of_processes_is_taken_from_the_environment(value, count, monkeypatch):
    monkeypatch.setenv("MESHTUNE_DATA_PROCESSES", value)
    if count is not None:
        assert process_count() == count
        return
    with pytest.raises(UserError, match="MESHTUNE_DATA_PROCESSES"):
        process_count()
