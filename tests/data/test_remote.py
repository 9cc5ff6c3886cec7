"""Data at addresses that fsspec opens: file:// and memory:// stand for object stores, whose libraries are missing."""

from __future__ import annotations

import gzip
import json

import fsspec
import pytest

from data.preparing import MODEL, prepared, records
from meshtune.config.recipe import Recipe
from meshtune.data.prepare import prepare_data
from meshtune.data.readers.remote import open_url, remote_errors, remote_status
from meshtune.data.tokenizer import load_tokenizer
from meshtune.errors import UserError

LINES = "\n".join(map(json.dumps, records("sft", 30)))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    return tmp_path / "cache"


def run(url):
    fields = {"model": "none", "output": "out", "data": url}
    return prepare_data(Recipe.model_validate(fields), load_tokenizer(MODEL, "plain"))


def test_remote_data_are_those_of_a_local_file(tmp_path, cache):
    (tmp_path / "a.jsonl").write_text(LINES)
    fsspec.filesystem("memory").pipe(
        {"/bucket/a.jsonl": LINES.encode(), "/bucket/folder/b.jsonl.gz": gzip.compress(b"{}")}
    )
    local = [example.ids.tolist() for example in prepared(tmp_path / "a.jsonl", cache, "sft").train.store]
    for url in ("memory://bucket/a.jsonl", f"file://{tmp_path}/a.jsonl"):
        data = run(url)
        assert [example.ids.tolist() for example in data.train.store] == local
        assert data.train.store.origin(3).source.endswith("a.jsonl")
        assert "://" in data.train.store.origin(3).source


def test_a_folder_has_files_of_several_types_and_is_copied_once(monkeypatch):
    memory = fsspec.filesystem("memory")
    memory.pipe(
        {
            "/bucket/a.jsonl": b'{"n": 1}\n{"n": 2}',
            "/bucket/b.csv.gz": gzip.compress(b"n\n3\n"),
            "/bucket/README.md": b"",
        }
    )
    records = open_url("memory://bucket", "train")
    assert [records[index]["n"] for index in range(3)] == [1, 2, "3"]

    def refuse(*arguments, **options):
        raise AssertionError("copied again")

    monkeypatch.setattr(type(memory), "get_file", refuse)
    assert len(open_url("memory://bucket/", "train")) == 3


def test_a_remote_file_that_changed_is_read_again_and_named():
    memory = fsspec.filesystem("memory")
    memory.pipe("/bucket/a.jsonl", LINES.encode())
    first = run("memory://bucket/a.jsonl")
    assert not run("memory://bucket/a.jsonl").report.changed
    memory.pipe("/bucket/a.jsonl", LINES.replace("It is", "It was").encode())
    changed = run("memory://bucket/a.jsonl")
    assert changed.fingerprint != first.fingerprint
    assert changed.report.changed == ("memory://bucket/a.jsonl",)


@pytest.mark.parametrize("url", ["memory://no-bucket/a.jsonl", "memory://no-bucket", "file:///no/such/folder"])
def test_a_bucket_or_file_that_is_not_there_is_named(url):
    for read in (run, remote_status):
        with pytest.raises(UserError, match="no such bucket, folder or file") as caught:
            read(url)
        assert "no" in str(caught.value.where)


def test_a_protocol_whose_library_is_missing_names_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(UserError, match="pip install s3fs"):
        run("s3://bucket/a.jsonl")
    with pytest.raises(UserError, match="no such kind of address"):
        run("nonsense://bucket/a.jsonl")


@pytest.mark.parametrize("problem", [PermissionError("Forbidden"), OSError("Unable to locate credentials")])
def test_missing_credentials_are_said_to_be(monkeypatch, problem):
    """As s3fs and botocore raise them."""

    def refuse(*arguments, **options):
        raise problem

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "find", refuse)
    with pytest.raises(UserError, match=r"credentials are missing or not enough(.|\n)*AWS_ACCESS_KEY_ID"):
        run("memory://bucket/a.jsonl")


def test_other_failures_of_a_library_are_no_traceback():
    with pytest.raises(UserError, match="the address cannot be used: broken"), remote_errors("s3://x"):
        raise RuntimeError("broken")
