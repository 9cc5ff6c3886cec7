"""Data at addresses that fsspec opens: file:// and memory:// stand for object stores, whose libraries are missing."""

from __future__ import annotations

import gzip
import json

import fsspec
import pytest

import meshtune.data.store as store_module
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
    monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)
    with pytest.raises(UserError, match="pip install gcsfs"):
        run("gs://bucket/a.jsonl")
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


def prepare(url, cache, monkeypatch, file, *, upload=False, **data):
    monkeypatch.setenv("MESHTUNE_CACHE", str(cache))
    fields = {"model": "none", "output": "out", "data": {"train": str(file), "prepared": url, **data}}
    recipe = Recipe.model_validate(fields)
    return prepare_data(recipe, load_tokenizer(MODEL, "plain"), upload=upload)


@pytest.fixture(params=["memory", "file", "s3"])
def folder(request, tmp_path):
    """An empty folder that is no local path: its address, and its file system. For s3 there is moto's HTTP server."""
    if request.param == "file":
        yield f"file://{tmp_path}/sets", fsspec.filesystem("file")
    elif request.param == "memory":
        yield "memory://sets/deep", fsspec.filesystem("memory")
    else:
        pytest.importorskip("s3fs")
        server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0)
        server.start()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*server.get_host_and_port()))
            patch.setenv("AWS_ACCESS_KEY_ID", "key")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
            patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
            fsspec.get_filesystem_class("s3").clear_instance_cache()
            system = fsspec.filesystem("s3")
            bucket = tmp_path.name.replace("_", "-")  # they outlive moto's server
            system.mkdir(bucket)
            yield f"s3://{bucket}/sets", system
        server.stop()


def test_prepared_data_are_opened_from_a_folder_without_their_sources(folder, tmp_path, monkeypatch):
    """Shards are downloaded when they are read, and not uploaded again."""
    url, system = folder
    monkeypatch.setattr("meshtune.data.store.SHARD", 8)
    monkeypatch.setenv("MESHTUNE_DATA_PROCESSES", "1")
    file = tmp_path / "a.jsonl"
    file.write_text(LINES)
    if not url.startswith("memory"):
        with pytest.raises(UserError, match=r"no such bucket|no data that were prepared"):
            prepare(url, tmp_path / "none", monkeypatch, file)
    first = prepare(url, tmp_path / "first", monkeypatch, file, upload=True)
    shard = next(name for name in system.find(url) if name.endswith("shard-00002.safetensors"))
    data = system.cat_file(shard)
    system.pipe_file(shard, bytes(len(data)))
    prepare(url, tmp_path / "first", monkeypatch, file, upload=True)
    assert system.cat_file(shard) == bytes(len(data)), "it is there, and was not to be uploaded again"
    system.pipe_file(shard, data)
    file.unlink()
    second = prepare(url, tmp_path / "second", monkeypatch, file)
    assert not second.report.changed
    assert second.fingerprint == first.fingerprint
    shards = [shard.name for shard in second.train.store.files]
    assert len(shards) == 4
    assert not list((tmp_path / "second").glob("tokens/*/shard-*.safetensors"))
    assert second.train.store[9].ids.tolist() == first.train.store[9].ids.tolist()
    assert [path.name for path in (tmp_path / "second").glob("tokens/*/shard-*.safetensors")] == shards[1:2]
    for step in range(2):
        one, other = first.train.batch(step).arrays, second.train.batch(step).arrays
        assert all((one[name] == other[name]).all() for name in one)
    with pytest.raises(UserError, match="no data that were prepared with these") as caught:
        prepare(url, tmp_path / "second", monkeypatch, file, max_length=32)
    assert "meshtune data prepare" in caught.value.fix


def test_a_damaged_shard_comes_again(tmp_path, monkeypatch):
    file, url = tmp_path / "a.jsonl", f"file://{tmp_path}/sets"
    file.write_text(LINES)
    prepare(url, tmp_path / "first", monkeypatch, file, upload=True)
    expected = [example.ids.tolist() for example in prepare(url, tmp_path / "second", monkeypatch, file).train.store]
    shard = min((tmp_path / "second").glob("tokens/*/shard-*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-40] ^= 1
    shard.write_bytes(data)
    store_module._open_shard.cache_clear()
    with pytest.raises(UserError, match="damaged"):
        list(prepare(url, tmp_path / "second", monkeypatch, file).train.store)
    store_module._open_shard.cache_clear()
    again = prepare(url, tmp_path / "second", monkeypatch, file)
    assert [example.ids.tolist() for example in again.train.store] == expected


def test_where_nothing_can_be_written_is_said_before_anything_is_prepared(folder, tmp_path, monkeypatch):
    url, _ = folder
    file = tmp_path / "a.jsonl"
    file.write_text("no JSON")
    if url.startswith("file"):
        (tmp_path / "sets").write_text("a file")
        message = "cannot be used"
    elif url.startswith("s3"):
        url, message = "s3://no-bucket/sets", "no such bucket"
    else:
        url, message = "nothing://sets", "no such kind of address"
    with pytest.raises(UserError, match=message):
        prepare(url, tmp_path / "first", monkeypatch, file, upload=True)


def test_missing_credentials_of_a_bucket_are_named(tmp_path, monkeypatch):
    pytest.importorskip("s3fs")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    file = tmp_path / "a.jsonl"
    file.write_text(LINES)
    with pytest.raises(UserError, match="credentials are missing") as caught:
        prepare("s3://bucket/sets", tmp_path / "first", monkeypatch, file, upload=True)
    assert "AWS_ACCESS_KEY_ID" in caught.value.fix
