"""Files that are not what they should be: each is refused with its name and its fault."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from meshtune.errors import UserError
from meshtune.weights.load import load_config, load_spec
from meshtune.weights.safetensors_files import headers, read_header
from meshtune.weights.tensor_reader import TensorReader

TENSORS = {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.arange(5, dtype=np.int64)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def refusal(call, *arguments) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments)
    return str(caught.value)


def with_header(file: Path, edit) -> None:
    """Writes the file again with its header changed and its data unchanged."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def test_headers_and_tensors_equal_what_the_library_reads(file):
    actual = headers(file.parent)
    assert {name: (info.shape, info.dtype) for name, info in actual.items()} == {
        "a": ((3, 4), "F32"),
        "b": ((5,), "I64"),
    }
    with TensorReader() as reader:
        for name, tensor in load_file(file).items():
            np.testing.assert_array_equal(reader.tensor(actual[name]), tensor)
        np.testing.assert_array_equal(reader.rows(actual["a"], 1, 3), TENSORS["a"][1:3])


@pytest.mark.parametrize("lost", [1, 20, 60])
def test_a_half_written_file_is_named(file, lost):
    data = file.read_bytes()
    file.write_bytes(data[:-lost])
    message = refusal(headers, file.parent)
    assert "model.safetensors is not a whole safetensors file" in message
    assert f"half-written: {len(data) - lost:,} of {len(data):,} bytes" in message


def test_a_file_without_tensors_is_refused(file):
    save_file({}, file)
    assert "hold no tensors" in refusal(headers, file.parent)


def test_a_file_cut_in_its_header_is_named(file):
    file.write_bytes(file.read_bytes()[:40])
    assert "the file ends after 32" in refusal(headers, file.parent)


def test_an_empty_file_is_named(file):
    file.write_bytes(b"")
    assert "it is 0 bytes long, too short for a header" in refusal(headers, file.parent)


def test_a_file_of_something_else_is_named(file):
    file.write_bytes(b"<!DOCTYPE html><html>Not found</html>" * 10)
    assert "does not start with a safetensors header" in refusal(headers, file.parent)


def test_a_git_lfs_pointer_is_recognised(file):
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1234\n")
    message = refusal(headers, file.parent)
    assert "Git LFS pointer" in message
    assert "git lfs pull" in message


def test_trailing_bytes_are_refused(file):
    file.write_bytes(file.read_bytes() + b"xxxx")
    assert "its tensors end at byte" in refusal(headers, file.parent)


def test_a_header_that_is_not_json_is_refused(file):
    file.write_bytes(struct.pack("<Q", 4) + b"{{{{")
    assert "its header is not JSON" in refusal(headers, file.parent)


def test_offsets_that_do_not_fit_the_shape_are_refused(file):
    with_header(file, lambda header: header["a"].update(shape=[4, 4]))
    assert "tensor 'a' F32[4, 4] needs 64 bytes, the header gives 48" in refusal(read_header, file)


def test_overlapping_tensors_are_refused(file):
    with_header(file, lambda header: header["b"].update(data_offsets=header["a"]["data_offsets"][:1] * 2, shape=[0]))
    assert "is not a whole safetensors file" in refusal(read_header, file)


@pytest.mark.parametrize("entry", [{"dtype": "F32"}, {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, 7])
def test_malformed_entries_are_refused(file, entry):
    with_header(file, lambda header: header.update(a=entry))
    assert "the header's entry for tensor 'a' is malformed" in refusal(read_header, file)


def test_missing_shards_are_counted_and_named(make_model):
    directory = make_model("llama", max_shard_size=20_000)
    shards = sorted(directory.glob("*.safetensors"))
    shards[1].unlink()
    message = refusal(headers, directory)
    assert f"1 of {len(shards)} shards is missing: {shards[1].name}" in message
    shards[2].unlink()
    (directory / "model.safetensors.index.json").unlink()
    assert f"2 of {len(shards)} shards are missing: {shards[1].name}, {shards[2].name}" in refusal(headers, directory)


def test_an_index_that_names_tensors_its_shards_lack_is_refused(make_model):
    directory = make_model("llama", max_shard_size=20_000)
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shard = content["weight_map"]["model.norm.weight"]
    content["weight_map"]["model.extra.weight"] = shard
    index.write_text(json.dumps(content))
    message = refusal(headers, directory)
    assert "the index names 1 tensor that the shards do not hold" in message
    assert f"'model.extra.weight', which it says is in {shard}" in message


@pytest.mark.parametrize(
    "shard", ["../secret.safetensors", "/etc/passwd", "pytorch_model.bin", 3, "x" * 300 + ".safetensors"]
)
def test_an_index_may_name_safetensors_beside_it_alone(make_model, shard):
    directory = make_model("llama", max_shard_size=20_000)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": shard}}))
    assert "not the name of a safetensors file" in refusal(headers, directory)


def test_the_same_tensor_in_two_files_is_refused(make_model):
    directory = make_model("llama", max_shard_size=20_000)
    first, second, *_ = sorted(directory.glob("*.safetensors"))
    save_file(load_file(first), second)
    message = refusal(headers, directory)
    assert f"is in two files, {first.name} and {second.name}" in message


def test_pickled_weights_are_refused_unread(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    mark = tmp_path / "owned"
    (tmp_path / "pytorch_model.bin").write_bytes(b"cposix\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR.")
    message = refusal(headers, tmp_path)
    assert "only pickled weights are here (pytorch_model.bin)" in message
    assert "save_pretrained" in message
    assert not mark.exists()


def test_an_adapter_directory_is_recognised(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "adapter_model.safetensors")
    assert "this directory holds an adapter, not a model" in refusal(headers, tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path):
    assert "no weights: neither model.safetensors" in refusal(headers, tmp_path)


def test_a_directory_without_a_config_is_refused(file):
    message = refusal(load_config, file.parent)
    assert "no config.json" in message
    assert "here are: model.safetensors" in message


def test_malformed_config_names_line_and_column(make_model):
    directory = make_model("llama")
    (directory / "config.json").write_text('{\n "model_type": "llama",\n "hidden_size": 32,,\n}')
    message = refusal(load_spec, directory)
    assert "malformed JSON" in message
    assert "config.json, line 3, column 20" in message


@pytest.mark.parametrize(("content", "message"), [(b"[1]", "found list"), (b"\xff\xfe", "not UTF-8")])
def test_a_config_that_is_no_json_object_is_refused(make_model, content, message):
    directory = make_model("llama")
    (directory / "config.json").write_bytes(content)
    assert message in refusal(load_spec, directory)


def test_an_unknown_dtype_in_the_config_is_refused(make_model, edit_config):
    directory = make_model("llama")
    edit_config(directory, dtype="int8")
    message = refusal(load_spec, directory)
    assert "dtype 'int8' is not supported" in message
    assert "field dtype" in message


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2**64], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [2**32, 2**32], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 2**64]},
        {"dtype": ["F32"], "shape": [0], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": "12", "data_offsets": [0, 48]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [3, 4], "data_offsets": [8, 56]},
        [], None, "x", {},
    ],
)  # fmt: skip
def test_an_entry_that_does_not_say_where_a_tensor_is_names_it(file, entry):
    with_header(file, lambda header: header.update(a=entry))
    assert re.search("tensor '[ab]'", refusal(headers, file.parent))


def test_a_name_given_twice_and_a_deep_header_are_refused(file):
    for header in (b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":{}}', b'{"a":' + b"[" * 200_000):
        file.write_bytes(struct.pack("<Q", len(header)) + header)
        assert "its header is not JSON that can be read" in refusal(headers, file.parent)
