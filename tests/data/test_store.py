"""The token store returns the written examples, is built once, and is rebuilt and named if it is incomplete or
damaged."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
import tracemalloc

import numpy as np
import pytest

from meshtune.data.conversation import Conversation, Message, Origin
from meshtune.data.store import (
    _ARRAYS,
    cache_directory,
    fingerprint,
    group_examples,
    open_or_build,
    open_store,
    sample_digest,
)
from meshtune.data.tokens import Example
from meshtune.errors import UserError


def examples_of(n=5, length=7):
    for index in range(n):
        yield Example(
            np.arange(length, dtype=np.int32) + index,
            np.full(length, index / 4, np.float32),
            Origin(f"file{index % 2}.jsonl", index),
        )


class Builder:
    """Counts how often it is asked."""

    def __init__(self, n=5):
        self.n, self.built = n, 0

    def __call__(self):
        self.built += 1
        return group_examples(examples_of(self.n)), lambda: {"n": self.n}


def test_a_store_returns_the_examples_written(tmp_path):
    store = open_or_build("key", Builder(), tmp_path)
    assert len(store) == 5
    assert store.meta == {"n": 5}
    for index, want in enumerate(examples_of()):
        got = store[index]
        assert np.array_equal(got.ids, want.ids)
        assert np.array_equal(got.weights, want.weights)
        assert got.origin == want.origin
    assert store.lengths.tolist() == [7] * 5


def test_a_store_is_built_once(tmp_path):
    builder = Builder()
    for _ in range(3):
        open_or_build("key", builder, tmp_path)
    assert builder.built == 1


def test_extras_of_documents_are_kept_where_there_are_any(tmp_path):
    plain = list(examples_of(3))
    examples = [
        dataclasses.replace(example, extra=extra)
        for example, extra in zip(plain, (b"", b"\x00png", '{"answer": "é"}'.encode()), strict=True)
    ]
    store = open_or_build("extras", lambda: (group_examples(examples), dict), tmp_path)
    assert [document.extra for document in store] == [example.extra for example in examples]
    without = open_or_build("plain", lambda: (group_examples(plain), dict), tmp_path)
    assert [document.extra for document in without] == [b""] * 3
    assert {file.name for file in store.path.iterdir()} - {file.name for file in without.path.iterdir()} == {
        "extras.bin",
        "extra_offsets.bin",
    }
    (store.path / "extras.bin").write_bytes(b"\x01png" + b" " * 16)
    assert "extras.bin" in str(open_or_build("extras", lambda: (group_examples(examples), dict), tmp_path).damage)


def test_a_store_may_be_empty(tmp_path):
    assert len(open_or_build("key", Builder(0), tmp_path)) == 0


@pytest.mark.parametrize("name", [*(f"{name}.bin" for name in _ARRAYS), "meta.json"])
@pytest.mark.parametrize("harm", ["missing", "short", "flipped"])
def test_a_damaged_store_is_rebuilt_and_named(tmp_path, name, harm):
    builder = Builder()
    path = open_or_build("key", builder, tmp_path).path
    file = path / name
    data = bytearray(file.read_bytes())
    if harm == "missing":
        file.unlink()
    elif harm == "short":
        file.write_bytes(data[:-1])
    else:
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    store = open_or_build("key", builder, tmp_path)
    assert builder.built == 2
    assert len(store) == 5
    assert name in store.damage
    assert str(path) in store.damage
    assert open_or_build("key", builder, tmp_path).damage is None
    assert builder.built == 2


def test_no_flipped_bit_truncation_or_deletion_changes_what_a_store_returns(tmp_path):
    """120 random damages over all files of a store: each is noticed, named, and the store rebuilt."""
    rng = np.random.default_rng(20261122)
    builder = Builder()
    path = open_or_build("key", builder, tmp_path).path
    pristine = {file.name: file.read_bytes() for file in path.iterdir()}
    for index in range(120):
        name = sorted(pristine)[rng.integers(len(pristine))]
        data = bytearray(pristine[name])
        harm = ("flip", "truncate", "delete")[index % 3]
        if harm == "flip":
            bit = int(rng.integers(8 * len(data)))
            data[bit // 8] ^= 1 << bit % 8
        elif harm == "truncate":
            data = data[: rng.integers(len(data))]
        (path / name).write_bytes(data)
        if harm == "delete":
            (path / name).unlink()
        built = builder.built
        store = open_or_build("key", builder, tmp_path)
        assert builder.built == built + 1, f"{harm} of {name} went unnoticed"
        assert {file.name: file.read_bytes() for file in store.path.iterdir()} == pristine
        # A damaged name of the digest's key looks like a store of an earlier version, which is rebuilt without a word.
        assert store.damage is None or name in store.damage


def test_a_store_of_an_earlier_version_without_a_digest_is_rebuilt(tmp_path):
    builder = Builder()
    path = open_or_build("key", builder, tmp_path).path
    meta = json.loads((path / "meta.json").read_text())
    meta.pop("digest")
    (path / "meta.json").write_text(json.dumps(meta))
    assert open_or_build("key", builder, tmp_path).damage is None
    assert builder.built == 2


def test_a_killed_build_leaves_no_store(tmp_path):
    code = f"""
        import sys, os, signal; sys.path.insert(0, {str(__file__.rsplit("/", 1)[0])!r})
        from test_store import examples_of, group_examples, open_or_build
        def killed():
            yield from examples_of()
            os.kill(os.getpid(), signal.SIGKILL)
        open_or_build("key", lambda: (group_examples(killed()), dict), {str(tmp_path)!r})
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True)
    assert killed.returncode == -9
    assert open_store(cache_directory(tmp_path) / "key") is None
    builder = Builder()
    assert len(open_or_build("key", builder, tmp_path)) == 5
    assert builder.built == 1


def test_an_error_while_building_propagates_and_leaves_no_files(tmp_path):
    def failing():
        yield from examples_of()
        raise UserError("a bad record")

    with pytest.raises(UserError, match="a bad record"):
        open_or_build("key", lambda: (group_examples(failing()), dict), tmp_path)
    assert list(cache_directory(tmp_path).iterdir()) == []


def test_a_cache_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "tokens").write_text("a file in the way")
    with pytest.raises(UserError, match="MESHTUNE_CACHE"):
        open_or_build("key", Builder(), tmp_path)


def test_a_full_disk_is_reported_and_leaves_no_files(tmp_path):
    """A limit on the size of files replaces the full disk: the system answers both with an OSError while writing."""
    code = f"""
        import sys, resource; sys.path.insert(0, {str(__file__.rsplit("/", 1)[0])!r})
        from test_store import examples_of, group_examples, open_or_build, UserError
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            open_or_build("key", lambda: (group_examples(examples_of(500, 10_000)), dict), {str(tmp_path)!r})
        except UserError as error:
            print(error)
    """
    finished = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert "tokenised data cannot be written: File too large" in finished.stdout
    assert "MESHTUNE_CACHE" in finished.stdout
    assert list(cache_directory(tmp_path).iterdir()) == []


def test_an_error_of_the_source_is_not_reported_as_one_of_the_cache(tmp_path):
    def unreadable():
        yield from examples_of()
        raise FileNotFoundError("the source is gone")

    with pytest.raises(FileNotFoundError, match="the source is gone"):
        open_or_build("key", lambda: (group_examples(unreadable()), dict), tmp_path)


def test_the_cache_directory_can_be_set(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "elsewhere"))
    assert open_or_build("key", Builder()).path.parent == tmp_path / "elsewhere/tokens"


def test_building_holds_one_document_at_a_time(tmp_path):
    """40 MB are written in under 12 MB of Python memory: a document, and 1 MB of buffer for each of six files."""
    tracemalloc.start()
    store = open_or_build("key", lambda: (group_examples(examples_of(500, 10_000)), dict), tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert os.path.getsize(store.path / "ids.bin") == 20_000_000
    assert peak < 12e6


def test_fingerprints_follow_contents():
    def chat(text, weight=None):
        return Conversation((Message("user", "a"), Message("assistant", text, weight)), Origin("f", 0))

    def print_of(samples, *parts):
        return fingerprint(*(sample_digest(sample).hex() for sample in samples), *parts)

    prints = [
        print_of([chat("b")], "x"),
        print_of([chat("b")], "y"),
        print_of([chat("c")], "x"),
        print_of([chat("b", 0.5)], "x"),
        print_of([chat("b"), chat("b")], "x"),
    ]
    assert len(set(prints)) == 5
    assert print_of([chat("b")], "x") == prints[0]


def test_meta_is_plain_json(tmp_path):
    path = open_or_build("key", Builder(), tmp_path).path
    assert json.loads((path / "meta.json").read_text())["sources"] == ["file0.jsonl", "file1.jsonl"]
