"""Preparing in parts: killed and started again it gives the same store, and templates render as transformers does."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from data.preparing import MODEL, contents, prepared, records
from meshtune.config.data_options import TokenOptions
from meshtune.data.chat import ChatTemplate
from meshtune.data.chat_templates import template_names
from meshtune.data.conversation import Origin, Text
from meshtune.data.loader import PartTask, StageExamples
from meshtune.data.progress import ProgressClock
from meshtune.data.store import read_part, tokenised_parts
from meshtune.data.tokenizer import load_tokenizer

SIZE = 32
KILLED = f"""
import sys, time
import meshtune.data.store, meshtune.data.tokenise
meshtune.data.store.PART = meshtune.data.tokenise.PART = {SIZE}
sys.path.insert(0, {str(pathlib.Path(__file__).parents[1])!r})
from data.preparing import prepared
prepared(sys.argv[1], sys.argv[2], sys.argv[3], lambda activity, done, of: time.sleep("tokenising" in activity and 0.5))
"""


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr("meshtune.data.store.PART", SIZE)
    monkeypatch.setattr("meshtune.data.tokenise.PART", SIZE)


@pytest.mark.parametrize("stage", ["sft", "dpo", "kto"])
def test_a_store_made_in_parts_is_the_one_made_at_once(stage, tmp_path, monkeypatch):
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(map(json.dumps, records(stage, 600))))
    at_once = prepared(file, tmp_path / "at_once", stage)
    monkeypatch.setattr("meshtune.data.store.PART", SIZE)
    monkeypatch.setattr("meshtune.data.tokenise.PART", SIZE)
    in_parts = prepared(file, tmp_path / "in_parts", stage)
    assert contents(in_parts) == contents(at_once)
    assert not list((tmp_path / "in_parts/tokens").glob(".parts-*"))


@pytest.mark.slow
def test_a_killed_preparation_goes_on_where_it_was(tmp_path, small_parts, monkeypatch):
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(map(json.dumps, records("sft", 10 * SIZE))))
    cache = tmp_path / "cache"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(file), str(cache), "sft"])
    deadline = time.monotonic() + 240
    while len(list(cache.glob("tokens/.parts-*/*.npz"))) < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    files = list(cache.glob("tokens/.parts-*/*.npz"))
    assert 3 <= len(files) < 10
    damaged = files[0]
    damaged.write_bytes(damaged.read_bytes()[:-40])
    reused = []
    read = read_part

    def count_reads(part_file):
        part = read(part_file)
        reused.append(part is not None)
        return part

    monkeypatch.setattr("meshtune.data.store.read_part", count_reads)
    resumed = prepared(file, cache, "sft")
    assert sum(reused) == len(files) - 1
    assert contents(resumed) == contents(prepared(file, tmp_path / "fresh", "sft"))


@pytest.mark.parametrize("name", template_names())
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


def test_hosts_that_share_a_cache_tokenise_a_part_each(tmp_path, monkeypatch):
    monkeypatch.setattr("meshtune.data.store.PART", SIZE)
    samples = [Text(f"text {index}", Origin("data", index)) for index in range(10 * SIZE + 3)]
    task = PartTask(load_tokenizer(MODEL), TokenOptions(16), StageExamples("documents"))
    parts_of: dict[int, list[int]] = {0: [], 1: []}

    def maker(host):
        make = task.maker()

        def count_parts(chosen):
            parts_of[host].append(chosen[0].origin.record // SIZE)
            return make(chosen)

        return count_parts

    def run(host, hosts, folder):
        return tokenised_parts(samples, [maker(host)], folder, lambda done: None, (host, hosts))

    first, second = (run(host, 2, tmp_path / "shared") for host in (0, 1))
    received = [[next(first)], [next(second)]]  # each has made its share before the first part is handed on
    received[0] += first
    received[1] += second
    # The first host works a part ahead, of which the other one has not made any yet.
    assert parts_of[0] in ([0, 2, 4, 6, 8, 10], [0, 2, 4, 6, 8, 10, 1])
    assert parts_of[1] in ([1, 3, 5, 7, 9], [3, 5, 7, 9])
    alone = list(run(0, 1, None))
    for host in (0, 1):
        for part, expected in zip(received[host], alone, strict=True):
            assert part.examples.ids.tolist() == expected.examples.ids.tolist()
            assert part.examples.records.tolist() == expected.examples.records.tolist()


@pytest.mark.parametrize("host", [0, 1])
def test_a_host_whose_cache_no_other_shares_prepares_everything(host, tmp_path, small_parts):
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(map(json.dumps, records("sft", 200))))
    shared = prepared(file, tmp_path / "one_of_two", "sft", share=(host, 2))
    assert contents(shared) == contents(prepared(file, tmp_path / "alone", "sft"))
