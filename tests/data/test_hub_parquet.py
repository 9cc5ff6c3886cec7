"""A stream reads parquet files of a hub in parts over real HTTP: few bytes, the same batches, and clear errors."""

from __future__ import annotations

import os

import pytest

from data.test_parquet_stream import GROUP, GROUPS, file, open_stream, read_last, tokenizer  # noqa: F401 - fixtures
from data.test_stream import arrays, assert_same
from hub.fake_hub import TOKEN, Repository, running_hub
from meshtune.errors import UserError

CARD = b"""---
configs:
- config_name: en
  data_files:
  - {split: train, path: data/en/*.parquet}
  - {split: test, path: data/test.parquet}
---
"""


@pytest.fixture
def hub(file, tmp_path, monkeypatch):  # noqa: F811
    """A hub with `ann/chats`, whose file is that of the fixture."""
    import datasets
    import huggingface_hub
    from huggingface_hub import constants

    with running_hub() as running:
        for name, value in (("HF_ENDPOINT", running.url), ("HF_TOKEN", TOKEN), ("no_proxy", "127.0.0.1")):
            monkeypatch.setenv(name, value)
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        template = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in (("ENDPOINT", running.url), ("HF_HUB_OFFLINE", False), ("HF_HUB_DISABLE_XET", True)):
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", running.url)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf/datasets"))
        huggingface_hub.HfFileSystem.clear_instance_cache()
        huggingface_hub.close_session()
        files = {"README.md": CARD, "data/en/a.parquet": file.read_bytes(), "data/test.parquet": file.read_bytes()}
        running.repositories["ann/chats"] = Repository(files=files)
        running.repositories["ann/damaged"] = Repository(files={"train.parquet": b"PAR1 and no more than this"})
        yield running
        huggingface_hub.close_session()


SOURCE = {"path": "ann/chats", "subset": "en"}


def test_a_stream_takes_a_small_share_of_a_file_and_the_same_batches(hub, file, tmp_path, tokenizer):  # noqa: F811
    stream = open_stream(tmp_path, tokenizer, SOURCE)
    assert len(stream.documents) == GROUP * GROUPS
    batches = list(stream.iterate(0, 16))
    read = {origin.record for batch in batches for row in batch.origins for places in row for origin in [*places]}
    assert len(read) > 300
    size = os.path.getsize(file)
    assert 0 < hub.bytes_sent["a.parquet"] < size / 2
    assert not list((tmp_path / "hf").rglob("*.arrow"))
    (tmp_path / "local").mkdir()
    assert_same(arrays(batches), arrays(open_stream(tmp_path / "local", tokenizer, str(file)).iterate(0, 16)))
    again = open_stream(tmp_path, tokenizer, SOURCE)
    assert_same(arrays(again.iterate(7, 16)), arrays(batches[7:]))
    assert again.fingerprint == stream.fingerprint


def test_an_address_of_the_hub_is_read_in_parts_too(hub, file, tmp_path, tokenizer):  # noqa: F811
    expected = arrays(open_stream(tmp_path, tokenizer, str(file)).iterate(0, 5))
    url = "hf://datasets/ann/chats/data/en/a.parquet"
    assert_same(arrays(open_stream(tmp_path, tokenizer, url).iterate(0, 5)), expected)
    assert hub.bytes_sent["a.parquet"] < os.path.getsize(file) / 2


@pytest.mark.parametrize(
    ("source", "problem", "fix"),
    [
        ({"path": "ann/nothing"}, "has no data set 'ann/nothing' that you may read", "HF_TOKEN"),
        ({**SOURCE, "split": "dev"}, "the data set has no split 'dev'", "set split to one of: train, test"),
        ({**SOURCE, "subset": "de"}, "'de' not found", "check subset"),
        ({"path": "ann/damaged"}, "cannot read the parquet file", "write or download it again"),
    ],
)
def test_what_does_not_exist_is_named(hub, tmp_path, tokenizer, source, problem, fix):  # noqa: F811
    with pytest.raises(UserError) as caught:
        open_stream(tmp_path, tokenizer, source)
    assert problem in caught.value.what
    assert fix in caught.value.fix
    assert source["path"] in caught.value.where
    assert hub.bytes_sent["a.parquet"] == 0


def test_failures_that_pass_are_retried(hub, tmp_path, tokenizer, monkeypatch):  # noqa: F811
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    expected = read_last(open_stream(tmp_path, tokenizer, SOURCE))
    stream = open_stream(tmp_path, tokenizer, SOURCE)
    hub.failures += [500, 429, 503]
    assert read_last(stream) == expected
    assert not hub.failures


@pytest.mark.parametrize(
    ("status", "problem", "fix"),
    [
        (401, "credentials are missing or not enough", "HF_TOKEN"),
        (403, "credentials are missing or not enough", "HF_TOKEN"),
        (429, "too many requests", "resume=true"),
        (500, "the server fails", "resume=true"),
    ],
)
@pytest.mark.parametrize("skip", [False, True])
def test_a_server_that_refuses_during_a_run_ends_it(hub, tmp_path, tokenizer, monkeypatch, status, problem, fix, skip):  # noqa: F811
    """Its records are not skipped with on_bad: skip, and the run goes on where it ended."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    stream = open_stream(tmp_path, tokenizer, SOURCE, *(["data.on_bad=skip"] if skip else []))
    hub.failures += [status] * 6
    with pytest.raises(UserError) as caught:
        read_last(stream)
    assert problem in caught.value.what
    assert fix in caught.value.fix
    assert "ann/chats/data/en/a.parquet" in caught.value.where


def test_a_server_that_fails_as_a_stream_begins_is_named(hub, tmp_path, tokenizer, monkeypatch):  # noqa: F811
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.failures += [500] * 30
    with pytest.raises(UserError, match="the server fails") as caught:
        open_stream(tmp_path, tokenizer, SOURCE)
    assert "ann/chats" in caught.value.where


def test_a_file_that_changes_during_a_run_is_named(hub, file, tmp_path, tokenizer):  # noqa: F811
    stream = open_stream(tmp_path, tokenizer, SOURCE)
    files = hub.repositories["ann/chats"].files
    files["data/en/a.parquet"] = files["data/en/a.parquet"][:-100] + bytes(100)
    with pytest.raises(UserError, match="changed while it was read") as caught:
        read_last(stream)
    assert "ann/chats/data/en/a.parquet" in caught.value.where


def test_files_of_other_types_and_parts_of_splits_are_downloaded(hub, tmp_path, tokenizer):  # noqa: F811
    hub.repositories["ann/lines"] = Repository(files={"train.jsonl": b'{"instruction": "a", "output": "b"}\n' * 40})
    assert len(open_stream(tmp_path, tokenizer, {"path": "ann/lines"}).documents) == 40
    assert len(open_stream(tmp_path, tokenizer, {**SOURCE, "split": "train[:50]"}).documents) == 50


def test_the_parquet_copy_that_a_hub_makes_of_other_files_is_a_revision(hub, file, tmp_path, tokenizer):  # noqa: F811
    """Here the repository has only the files of that revision, as the hub names them."""
    hub.repositories["ann/copy"] = Repository(files={"default/train/0000.parquet": file.read_bytes()})
    stream = open_stream(tmp_path, tokenizer, {"path": "ann/copy", "revision": "refs/convert/parquet"})
    assert len(stream.documents) == GROUP * GROUPS
    assert str(stream.documents.origin(7)) == "ann/copy/default/train/0000.parquet, record 7"
    assert "revision/refs/convert/parquet" in " ".join(hub.paths("GET"))
