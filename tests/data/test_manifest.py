"""A prepared data set is opened by its manifest: sources are read again only if they have changed, with a warning."""

from __future__ import annotations

import json
import os
import pathlib
import time

import pytest

import meshtune.data.prepare as prepare_module
from data.preparing import MODEL, prepared, records
from meshtune.config.recipe import Recipe
from meshtune.data import manifest as manifest_module
from meshtune.data.prepare import prepare_data
from meshtune.data.store import _open_shard, write_json
from meshtune.data.tokenizer import load_tokenizer
from meshtune.errors import UserError


@pytest.fixture
def reads(monkeypatch):
    """Counts how often sources are read."""
    calls: list[int] = []
    load = prepare_module.load_documents

    def count(*arguments, **options):
        calls.append(1)
        return load(*arguments, **options)

    monkeypatch.setattr(prepare_module, "load_documents", count)
    return calls


def write(path: pathlib.Path, count: int = 20, age: float = 60.0, first: int = 0):
    """Writes records; their file is `age` seconds old."""
    lines = list(records("sft", first + count))[first:]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_a_second_run_reads_no_source(tmp_path, reads):
    file = write(tmp_path / "data.jsonl")
    first = prepared(file, tmp_path / "cache", "sft")
    file.chmod(0o000)
    again = prepared(file, tmp_path / "cache", "sft")
    assert len(reads) == 1
    assert again.report == first.report
    assert again.fingerprint == first.fingerprint
    for step in range(2):
        one, other = first.train.batch(step), again.train.batch(step)
        assert one.origins == other.origins
        assert all((one.arrays[name] == other.arrays[name]).all() for name in one.arrays)


def test_a_source_that_changed_is_read_again_and_named(tmp_path, reads):
    file = write(tmp_path / "data.jsonl")
    first = prepared(file, tmp_path / "cache", "sft")
    assert not first.report.changed
    write(file, first=1)  # a byte longer
    changed = prepared(file, tmp_path / "cache", "sft")
    assert len(reads) == 2
    assert changed.fingerprint != first.fingerprint
    assert changed.report.warnings[0] == f"{file} has changed since it was prepared; it was read again"
    assert not prepared(file, tmp_path / "cache", "sft").report.changed
    assert len(reads) == 2


def test_a_source_with_another_time_and_the_same_contents_is_not_read_again(tmp_path, reads):
    file = write(tmp_path / "data.jsonl")
    prepared(file, tmp_path / "cache", "sft")
    os.utime(file)
    prepared(file, tmp_path / "cache", "sft")
    assert len(reads) == 1


def test_a_change_within_the_tick_of_a_clock_is_noticed(tmp_path, reads):
    """The time of a file need not change when it is written to twice within it: one that was just written is hashed."""
    file = write(tmp_path / "data.jsonl", age=0.0)
    status = file.stat()
    prepared(file, tmp_path / "cache", "sft")
    text = file.read_text()
    file.write_text(text.replace("What is 1?", "What is 7?"))
    os.utime(file, ns=(status.st_mtime_ns, status.st_mtime_ns))
    assert file.stat().st_size == status.st_size
    prepared(file, tmp_path / "cache", "sft")
    assert len(reads) == 2


def test_files_that_come_into_a_folder_are_noticed(tmp_path, reads):
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "a.jsonl")
    first = prepared(folder, tmp_path / "cache", "sft")
    os.utime(folder, (time.time() - 60,) * 2)
    assert prepared(folder, tmp_path / "cache", "sft").fingerprint == first.fingerprint
    assert len(reads) == 1
    write(folder / "b.jsonl", first=20)
    both = prepared(folder, tmp_path / "cache", "sft")
    assert len(both.train.store) == 40
    assert len(reads) == 2


def test_a_manifest_of_another_tokenizer_or_of_other_options_is_not_used(tmp_path, reads):
    """Even one that was copied to the name of this data set's."""
    file, cache = write(tmp_path / "data.jsonl"), tmp_path / "cache"
    fields = {"model": "none", "output": "out", "data": str(file)}
    plain, alpaca = (load_tokenizer(MODEL, name) for name in ("plain", "alpaca"))
    prints = [prepare_data(Recipe.model_validate(fields), plain, cache=cache).fingerprint]
    (one,) = (cache / "tokens/manifests").iterdir()
    prints.append(prepare_data(Recipe.model_validate(fields), alpaca, cache=cache).fingerprint)
    (other,) = {*(cache / "tokens/manifests").iterdir()} - {one}
    assert prints[0] != prints[1]
    other.write_bytes(one.read_bytes())
    assert prepare_data(Recipe.model_validate(fields), alpaca, cache=cache).fingerprint == prints[1]
    assert len(reads) == 3


def test_a_damaged_manifest_or_store_is_prepared_again(tmp_path, reads):
    file, cache = write(tmp_path / "data.jsonl"), tmp_path / "cache"
    first = prepared(file, cache, "sft")
    (manifest,) = (cache / "tokens/manifests").iterdir()
    manifest.write_bytes(manifest.read_bytes().replace(b"facts", b"fects"))
    assert prepared(file, cache, "sft").fingerprint == first.fingerprint
    (shard,) = first.train.store.path.glob("shard-*")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1  # in the middle of a run, the document that is read says so
    shard.write_bytes(content)
    _open_shard.cache_clear()
    with pytest.raises(UserError, match=r"does not match its checksum(.|\n)*start again"):
        list(prepared(file, cache, "sft").train.store)
    healed = prepared(file, cache, "sft")
    assert "shard-00000" in healed.report.warnings[0]
    assert len(list(healed.train.store)) == 20
    assert len(reads) == 3


def test_a_manifest_of_an_earlier_layout_is_not_used(tmp_path, reads):
    file, cache = write(tmp_path / "data.jsonl"), tmp_path / "cache"
    path = prepared(file, cache, "sft").train.store.path
    content = json.loads((path / "manifest.json").read_text())
    content.pop("digest")
    write_json(path / "manifest.json", content | {"layout": 0})
    assert len(prepared(file, cache, "sft").train.store) == 20
    assert len(reads) == 2


def test_skipped_records_are_reported_from_the_manifest(tmp_path, reads):
    file = write(tmp_path / "data.jsonl")
    with file.open("a") as lines:
        lines.write("{}\n")
    os.utime(file, (time.time() - 60,) * 2)
    fields = {"model": "none", "output": "out", "data": {"train": str(file), "on_bad": "skip", "validation": 4}}
    tokenizer = load_tokenizer(MODEL, "plain")
    first, again = (prepare_data(Recipe.model_validate(fields), tokenizer, cache=tmp_path / "cache") for _ in range(2))
    assert len(reads) == 1
    assert len(again.report.skipped) == 1
    assert again.report == first.report
    assert again.validation_report == first.validation_report
    assert len(again.validation.store) == 4


def test_a_digest_of_a_file_that_changes_meanwhile_is_none(tmp_path):
    file = write(tmp_path / "data.jsonl")
    assert manifest_module.file_digest(file, (0, 0, 0)) == ""
