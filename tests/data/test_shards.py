"""Preparing in shards: by one process, several, several hosts and after a kill, the store is the same, bit for bit."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from data.preparing import MODEL, contents, prepared, records
from meshtune.config.data_options import TokenOptions
from meshtune.data.chat import ChatTemplate
from meshtune.data.chat_templates import template_names
from meshtune.data.conversation import Conversation, Message, Origin
from meshtune.data.loader import PartTask, StageExamples
from meshtune.data.progress import ProgressClock
from meshtune.data.store import SHARD_NAME
from meshtune.data.tasks import TaskProcess, process_count
from meshtune.data.tokenise import ShardTask
from meshtune.data.tokenizer import load_tokenizer
from meshtune.errors import UserError

CHATS = [name for name in template_names() if name != "paligemma"]  # which writes one question and its answer only
SIZE = 32
STARTED = f"""
import sys, time
import meshtune.data.store, meshtune.data.checking
meshtune.data.store.SHARD, meshtune.data.checking.RANGE = {SIZE}, 100
sys.path.insert(0, {str(pathlib.Path(__file__).parents[1])!r})
from data.preparing import prepared
prepared(sys.argv[1], sys.argv[2], "sft", lambda activity, done, of: time.sleep("tokenising" in activity and 0.4))
"""


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr("meshtune.data.store.SHARD", SIZE)
    monkeypatch.setattr("meshtune.data.checking.RANGE", 100)
    monkeypatch.setenv("MESHTUNE_DATA_PROCESSES", "1")


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


def write(path, stage, count):
    path.write_text("\n".join(map(json.dumps, records(stage, count))))
    return path


def documents(data):
    return [
        (example.ids.tolist(), example.weights.tolist(), example.origin, example.value) for example in data.train.store
    ]


@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_shards_hold_what_one_shard_does(stage, tmp_path, monkeypatch, request):
    file = write(tmp_path / "data.jsonl", stage, 300)
    at_once = prepared(file, tmp_path / "at_once", stage)
    request.getfixturevalue("small_shards")
    in_shards = prepared(file, tmp_path / "in_shards", stage)
    assert len(list(in_shards.train.store.path.glob("shard-*"))) == 10
    assert documents(in_shards) == documents(at_once)
    assert in_shards.fingerprint == at_once.fingerprint
    assert in_shards.report == at_once.report
    assert not [path for path in (tmp_path / "in_shards/tokens").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("stage", ["kto", *(pytest.param(stage, marks=pytest.mark.slow) for stage in ("sft", "dpo"))])
def test_processes_write_the_same_files(stage, tmp_path, small_shards, monkeypatch, started_pids):
    file = write(tmp_path / "data.jsonl", stage, 300)
    by_one = prepared(file, tmp_path / "one", stage)
    assert not started_pids
    monkeypatch.setenv("MESHTUNE_DATA_PROCESSES", "2")
    by_two = prepared(file, tmp_path / "two", stage)
    assert len(started_pids) == 4  # two to check the records, and two to tokenise them
    assert not any(map(psutil.pid_exists, started_pids))
    assert contents(by_two) == contents(by_one)


def test_hosts_that_share_a_cache_make_a_share_each_and_hosts_that_do_not_make_everything(
    tmp_path, small_shards, monkeypatch
):
    """Threads are the hosts: the locks of shards are those of open files."""
    file = write(tmp_path / "data.jsonl", "sft", 10 * SIZE)
    made: dict[str, list[str]] = {"0": [], "1": []}
    make = ShardTask.make
    both = threading.Barrier(2, timeout=60)

    def count(task, tokenize):
        shards = made[threading.current_thread().name]
        if not shards:
            both.wait()
        shards.append(task.file.name)
        return make(task, tokenize)

    monkeypatch.setattr(ShardTask, "make", count)
    results = {}

    def run(host, folder):
        results[host] = prepared(file, folder, "sft", share=(host, 2))

    for folders in (["shared", "shared"], ["cache-0", "cache-1"]):
        for names in made.values():
            names.clear()
        threads = [
            threading.Thread(target=run, args=(host, tmp_path / folder), name=str(host))
            for host, folder in enumerate(folders)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        complete = [SHARD_NAME.format(number) for number in range(10)]
        assert made["0"][0] == complete[0]
        assert made["1"][0] == complete[1]
        if folders[0] == folders[1]:
            assert sorted(made["0"] + made["1"]) == complete  # none twice
        else:
            assert sorted(made["0"]) == sorted(made["1"]) == complete
        assert contents(results[0]) == contents(results[1])
    assert contents(results[0]) == contents(prepared(file, tmp_path / "shared", "sft"))


def test_a_killed_preparation_ends_its_processes_and_goes_on_where_it_was(tmp_path, small_shards, monkeypatch):
    file, cache = write(tmp_path / "data.jsonl", "sft", 20 * SIZE), tmp_path / "cache"
    first = subprocess.Popen(
        [sys.executable, "-c", STARTED, str(file), str(cache)], env=os.environ | {"MESHTUNE_DATA_PROCESSES": "2"}
    )
    deadline = time.monotonic() + 240
    while len(list(cache.glob("tokens/*/shard-*.safetensors"))) < 3:
        assert first.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = psutil.Process(first.pid).children(recursive=True)
    assert len(children) == 2
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    psutil.wait_procs(children, timeout=60)
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    finished = sorted(cache.glob("tokens/*/shard-*.safetensors"))
    assert 3 <= len(finished) < 20
    finished[0].write_bytes(finished[0].read_bytes()[:40])  # a header that promises more
    times = {path.name: path.stat().st_mtime_ns for path in finished}
    resumed = prepared(file, cache, "sft")
    again = {path.name for path in finished if path.stat().st_mtime_ns != times[path.name]}
    assert again == {finished[0].name}
    assert contents(resumed) == contents(prepared(file, tmp_path / "fresh", "sft"))


def test_an_error_in_a_process_is_the_one_in_a_thread(tmp_path):
    task = PartTask(load_tokenizer(MODEL, "plain"), TokenOptions(16, overlong="error"), StageExamples("documents"))
    document = Conversation((Message("user", "x"), Message("assistant", "y " * 90)), Origin("data.jsonl", 7))
    shard = ShardTask(tmp_path / "shard", Documents([document]), task.convert, task.options)
    with pytest.raises(UserError) as expected:
        shard.make(task.tokenize())
    with TaskProcess(pickle.dumps(task)) as process:
        with pytest.raises(UserError) as raised:
            process(shard)
        assert str(raised.value) == str(expected.value)
        assert "record 7" in str(raised.value)


class Documents(list):
    def check_unchanged(self):
        """Nothing changes."""


def test_the_first_error_is_the_one_of_the_first_record(tmp_path, small_shards, monkeypatch):
    """Two processes meet one each."""
    lines = list(records("sft", 4 * SIZE))
    for bad in (SIZE + 1, SIZE - 1):
        lines[bad]["messages"] = lines[bad]["messages"][:1]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr("meshtune.data.checking.RANGE", SIZE)
    monkeypatch.setenv("MESHTUNE_DATA_PROCESSES", "2")
    with pytest.raises(UserError, match="on_bad=skip") as caught:
        prepared(tmp_path / "data.jsonl", tmp_path / "cache", "sft")
    assert f"(line {SIZE})" in str(caught.value.where)


def test_a_process_that_dies_is_said_to_have(started_pids):
    task = PartTask(load_tokenizer(MODEL, "plain"), TokenOptions(16), StageExamples("documents"))
    with TaskProcess(pickle.dumps(task)) as process:
        os.kill(started_pids[0], signal.SIGKILL)
        with pytest.raises(UserError, match=r"ended with signal SIGKILL(.|\n)*MESHTUNE_DATA_PROCESSES"):
            process(ShardTask(pathlib.Path("x"), Documents(), task.convert, task.options))


def test_a_process_imports_neither_jax_nor_the_program_that_starts_it():
    script = "import meshtune.data.tasks, sys; sys.exit('jax' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


@pytest.mark.parametrize(("value", "count"), [("1", 1), ("12", 12), ("0", None), ("many", None)])
def test_the_number_of_processes_is_taken_from_the_environment(value, count, monkeypatch):
    monkeypatch.setenv("MESHTUNE_DATA_PROCESSES", value)
    if count is not None:
        assert process_count() == count
        return
    with pytest.raises(UserError, match="MESHTUNE_DATA_PROCESSES"):
        process_count()


@pytest.mark.parametrize("name", CHATS)
def test_plain_messages_are_rendered_as_by_transformers(name):
    tokenizer = load_tokenizer(MODEL, name)
    chat = ChatTemplate(tokenizer)
    turns = [{"role": role, "content": f" {role} {{{{ x }}}} <b>\n"} for role in ("user", "assistant", "user")]
    for messages in (turns, turns[:2], [{"role": "system", "content": "be brief"}, *turns]):
        for prompt in (False, True):
            expected = tokenizer.apply_chat_template(
                messages, chat_template=chat._without_tools.text, add_generation_prompt=prompt, tokenize=False
            )
            assert chat.render(messages, generation_prompt=prompt) == expected


def test_progress_tells_the_time_left():
    seconds = iter([0.0, 10.0, 20.0])
    clock = ProgressClock(lambda: next(seconds))
    assert clock.line("tokenising", 0, 4096) == "tokenising: 0 of 4,096"
    assert clock.line("tokenising", 1024, 4096) == "tokenising: 1,024 of 4,096, 0:30 left"
    assert clock.line("tokenising", 4096, 4096) == "tokenising: 4,096 of 4,096"
