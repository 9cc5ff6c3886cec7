"""The token store: what comes back is what went in, it is built once, and nothing half-written is ever used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import tracemalloc

import numpy as np
import pytest

from meshtune.data.conversation import Conversation, Message, Origin
from meshtune.data.store import _ARRAYS, cache_directory, fingerprint, open_or_build, open_store
from meshtune.data.tokens import Example
from meshtune.errors import UserError


def made(n=5, length=7):
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
        return made(self.n), lambda: {"n": self.n}


def test_what_went_in_comes_out(tmp_path):
    store = open_or_build("key", Builder(), tmp_path)
    assert len(store) == 5
    assert store.meta == {"n": 5}
    for index, want in enumerate(made()):
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


def test_an_empty_store_is_one(tmp_path):
    assert len(open_or_build("key", Builder(0), tmp_path)) == 0


@pytest.mark.parametrize("name", [*(f"{name}.bin" for name in _ARRAYS), "meta.json"])
@pytest.mark.parametrize("harm", ["missing", "short", "flipped"])
def test_damaged_stores_are_built_again(tmp_path, name, harm):
    builder = Builder()
    path = open_or_build("key", builder, tmp_path).path
    file = path / name
    data = bytearray(file.read_bytes())
    if harm == "missing":
        file.unlink()
    elif harm == "short":
        file.write_bytes(data[:-1])
    else:
        data[0 if name == "meta.json" else len(data) // 2] ^= 1  # not every bit of the notes matters
        file.write_bytes(data)
    store = open_or_build("key", builder, tmp_path)
    assert builder.built == 2
    assert len(store) == 5


def test_a_build_that_is_killed_leaves_nothing_that_is_used(tmp_path):
    code = f"""
        import sys, os, signal; sys.path.insert(0, {str(__file__.rsplit("/", 1)[0])!r})
        from test_store import made, open_or_build
        def examples():
            yield from made()
            os.kill(os.getpid(), signal.SIGKILL)
        open_or_build("key", lambda: (examples(), dict), {str(tmp_path)!r})
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True)
    assert killed.returncode == -9
    assert open_store(cache_directory(tmp_path) / "key") is None
    builder = Builder()
    assert len(open_or_build("key", builder, tmp_path)) == 5
    assert builder.built == 1


def test_an_error_while_building_is_the_callers_and_leaves_nothing(tmp_path):
    def failing():
        yield from made()
        raise UserError("a bad record")

    with pytest.raises(UserError, match="a bad record"):
        open_or_build("key", lambda: (failing(), dict), tmp_path)
    assert list(cache_directory(tmp_path).iterdir()) == []


def test_a_cache_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "tokens").write_text("a file in the way")
    with pytest.raises(UserError, match="MESHTUNE_CACHE"):
        open_or_build("key", Builder(), tmp_path)


def test_a_full_disk_says_so_and_leaves_nothing(tmp_path):
    """A limit on the size of files stands in for the disk: the system answers both with an OSError while writing."""
    code = f"""
        import sys, resource; sys.path.insert(0, {str(__file__.rsplit("/", 1)[0])!r})
        from test_store import made, open_or_build, UserError
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            open_or_build("key", lambda: (made(500, 10_000), dict), {str(tmp_path)!r})
        except UserError as error:
            print(error)
    """
    told = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert "tokenised data cannot be written: File too large" in told.stdout
    assert "MESHTUNE_CACHE" in told.stdout
    assert list(cache_directory(tmp_path).iterdir()) == []


def test_an_error_of_the_source_is_not_taken_for_the_caches(tmp_path):
    def unreadable():
        yield from made()
        raise FileNotFoundError("the source is gone")

    with pytest.raises(FileNotFoundError, match="the source is gone"):
        open_or_build("key", lambda: (unreadable(), dict), tmp_path)


def test_the_cache_directory_can_be_set(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "elsewhere"))
    assert open_or_build("key", Builder()).path.parent == tmp_path / "elsewhere/tokens"


def test_building_holds_one_document_at_a_time(tmp_path):
    """40 MB are written in under 12 MB of Python memory: a document, and 1 MB of buffer for each of six files."""
    tracemalloc.start()
    store = open_or_build("key", lambda: (made(500, 10_000), dict), tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert os.path.getsize(store.path / "ids.bin") == 20_000_000
    assert peak < 12e6


def test_fingerprints_follow_contents():
    def chat(words, weight=None):
        return Conversation((Message("user", "a"), Message("assistant", words, weight)), Origin("f", 0))

    prints = [
        fingerprint([chat("b")], "x"),
        fingerprint([chat("b")], "y"),
        fingerprint([chat("c")], "x"),
        fingerprint([chat("b", 0.5)], "x"),
        fingerprint([chat("b"), chat("b")], "x"),
    ]
    assert len(set(prints)) == 5
    assert fingerprint([chat("b")], "x") == prints[0]


def test_meta_is_plain_json(tmp_path):
    path = open_or_build("key", Builder(), tmp_path).path
    assert json.loads((path / "meta.json").read_text())["sources"] == ["file0.jsonl", "file1.jsonl"]
