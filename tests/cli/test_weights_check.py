"""`meshtune weights check`, on a 405B checkpoint of sparse files: whole, and with one thing wrong."""

from __future__ import annotations

import json
import pathlib
import shutil
import struct
import sys
import time

import pytest

from meshtune.cli import main as program
from weights.load_job import write_model

LLAMA_405B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
SHARDS = 191
# https://huggingface.co/meta-llama/Llama-3.1-405B: 405.85 billion parameters
PARAMETERS = 405_853_388_800


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("llama") / "405b"
    total = write_model(folder, LLAMA_405B, SHARDS, sparse=True)
    assert total == 2 * PARAMETERS
    assert sum(file.stat().st_blocks for file in folder.iterdir()) * 512 < 10 << 20, "the files must be holes"
    return folder


@pytest.fixture
def check(monkeypatch, capsys):
    """Runs the verb: (exit code, output, errors, seconds)."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def run(*arguments: object) -> tuple[object, str, str, float]:
        began = time.monotonic()
        with pytest.raises(SystemExit) as ended:
            program.main(["weights", "check", *map(str, arguments)])
        seconds = time.monotonic() - began
        return ended.value.code, *capsys.readouterr(), seconds

    return run


def test_405b_is_checked_in_seconds(checkpoint, check):
    code, out, errors, seconds = check(checkpoint)
    assert (code, errors) == (0, "")
    assert "llama, 126 layers" in out
    assert "405,853,388,800" in out
    assert "811,706,777,600 (811.7 GB)" in out
    assert "191" in out
    assert "agree" in out
    assert seconds < 20, "headers alone; 20 s is for a busy machine"


def test_json_holds_the_same(checkpoint, check):
    code, out, _, _ = check(checkpoint, "--json")
    report = json.loads(out)
    assert code == 0
    assert report["parameters"] == PARAMETERS
    assert report["files"] == SHARDS
    assert report["tensors"] == 126 * 9 + 3
    assert report["dtypes"] == {"bfloat16": 2 * PARAMETERS}


@pytest.fixture
def damaged_checkpoint(checkpoint, tmp_path):
    """A copy by links, except for shard 100, which is a real file."""
    folder = tmp_path / "damaged"
    folder.mkdir()
    for file in checkpoint.iterdir():
        if "00100-of" not in file.name:
            (folder / file.name).symlink_to(file)
    shard = folder / f"model-00100-of-{SHARDS:05d}.safetensors"
    size = (checkpoint / shard.name).stat().st_size
    with (checkpoint / shard.name).open("rb") as source, shard.open("wb") as stream:
        (length,) = struct.unpack("<Q", source.read(8))
        stream.write(struct.pack("<Q", length) + source.read(length))
        stream.truncate(size)
    return folder, shard


def rewrite(shard: pathlib.Path, edit) -> str:
    """Edits the header of a file of holes; gives the name of the tensor that was edited."""
    with shard.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        entries = json.loads(stream.read(length))
    name = next(name for name, entry in entries.items() if len(entry["shape"]) == 2)
    edit(entries[name])
    data = max(entry["data_offsets"][1] for entry in entries.values())
    text = json.dumps(entries).encode()
    with shard.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + data)
    return name


def test_an_undamaged_copy_by_links_passes(damaged_checkpoint, check):
    assert check(damaged_checkpoint[0])[0] == 0


def test_a_truncated_shard_is_named(damaged_checkpoint, check):
    folder, shard = damaged_checkpoint
    size = shard.stat().st_size
    with shard.open("r+b") as stream:
        stream.truncate(size - 4096)
    code, _, errors, _ = check(folder)
    assert code == 2
    assert f"{shard.name} is not a whole safetensors file: it is half-written" in errors
    assert f"{size - 4096:,} of {size:,} bytes are there" in errors


def test_a_missing_shard_is_named(damaged_checkpoint, check):
    folder, shard = damaged_checkpoint
    shard.unlink()
    code, _, errors, _ = check(folder)
    assert code == 2
    assert f"1 of 191 shards is missing: {shard.name}" in errors


def test_a_wrong_shape_names_tensor_shard_and_field(damaged_checkpoint, check):
    folder, shard = damaged_checkpoint

    def turn(entry):
        entry["shape"] = [entry["shape"][0] // 2, entry["shape"][1] * 2]

    name = rewrite(shard, turn)
    code, _, errors, _ = check(folder)
    assert code == 2
    assert f"tensor '{name}' in {shard.name} has shape" in errors
    assert "in the config" in errors


def test_a_wrong_dtype_names_tensor_and_shard(damaged_checkpoint, check):
    folder, shard = damaged_checkpoint
    name = rewrite(shard, lambda entry: entry.update(dtype="I16"))
    code, _, errors, _ = check(folder)
    assert code == 2
    assert f"tensor '{name}' in {shard.name} has dtype I16" in errors


def test_shards_of_another_dtype_are_shown(damaged_checkpoint, check):
    folder, shard = damaged_checkpoint
    rewrite(shard, lambda entry: entry.update(dtype="F16"))
    code, out, _, _ = check(folder)
    assert code == 0
    assert "bfloat16 (" in out
    assert "float16 (" in out


def test_a_directory_that_is_not_there_is_said(check, tmp_path):
    code, _, errors, _ = check(tmp_path / "nothing")
    assert code == 2
    assert "there is no such directory" in errors


def test_a_head_that_is_also_written_out_is_shown_unread(check, tmp_path):
    config = LLAMA_405B | {"num_hidden_layers": 1, "tie_word_embeddings": False}
    write_model(tmp_path / "m", config, 1, sparse=True)
    (tmp_path / "m/config.json").write_text(json.dumps(config | {"tie_word_embeddings": True, "dtype": "bfloat16"}))
    code, out, _, seconds = check(tmp_path / "m")
    assert code == 0
    assert "not needed  lm_head.weight" in out
    assert seconds < 5, "8.4 GB of holes are not read"
    shutil.rmtree(tmp_path / "m")
