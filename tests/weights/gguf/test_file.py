"""GGUF headers, and errors for damaged files."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from meshtune.errors import UserError
from meshtune.quantize.gguf import TYPES
from meshtune.weights.gguf.file import read_gguf
from meshtune.weights.gguf.tensors import small_tensor
from meshtune.weights.gguf.writer import start_file

METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.tokens": ["a", "Ġb", "é"],
    "tokenizer.ggml.token_type": [1, 1, 3],
    "tokenizer.ggml.scores": [0.0, -1.5, 2.0],
    "tokenizer.ggml.add_bos_token": True,
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensors = {"a.weight": (TYPES["F32"], (2, 3)), "b.weight": (TYPES["F16"], (4,))}
    stream, offsets = start_file(tmp_path / "m.gguf", METADATA, tensors)
    with stream:
        for name, array in (("a.weight", matrix), ("b.weight", np.ones(4, np.float16))):
            stream.seek(offsets[name])
            stream.write(array.tobytes())
    return tmp_path / "m.gguf"


def without_tensors(file: Path, metadata: dict) -> Path:
    start_file(file, metadata, {})[0].close()
    return file


def test_a_header_is_read_by_the_package_gguf(file: Path):
    reader = gguf.GGUFReader(file)
    assert {key: reader.fields[key].contents() for key in METADATA} == METADATA
    assert [tensor.name for tensor in reader.tensors] == ["a.weight", "b.weight"]
    assert np.array_equal(reader.tensors[0].data, np.arange(6).reshape(2, 3))


def test_a_file_of_the_package_gguf_is_read(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "g.gguf", "llama")
    writer.add_block_count(3)
    writer.add_array("tokenizer.ggml.tokens", ["x", "yz"])
    writer.add_tensor("t.weight", np.ones((5, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = read_gguf(tmp_path / "g.gguf")
    assert read.of_architecture() == {"block_count": 3}
    assert read.metadata["tokenizer.ggml.tokens"] == ["x", "yz"]
    assert read.tensors["t.weight"].shape == (5, 32)


def test_the_parts_of_a_split_model_are_read_as_one(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "s.gguf", "llama", split_max_tensors=2)
    writer.add_block_count(3)
    for number in range(5):
        writer.add_tensor(f"{number}.weight", np.full((2, 32), number, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(tmp_path.glob("s-*.gguf"))
    assert [part.name for part in parts] == [f"s-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    for part in parts:
        read = read_gguf(part)
        assert read.of_architecture() == {"block_count": 3}
        assert [small_tensor(read, f"{n}.weight")[1, 7] for n in range(5)] == list(range(5))
    parts[1].rename(tmp_path / "t.gguf")
    with pytest.raises(UserError, match=r"s-00002-of-00003\.gguf is missing"):
        read_gguf(parts[0])
    with pytest.raises(UserError, match="its name does not say which"):
        read_gguf(tmp_path / "t.gguf")
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(UserError, match="by its name it is part 2 of 3, and by its content part 3 of 3"):
        read_gguf(parts[0])


def test_our_file_is_read_back(file: Path):
    read = read_gguf(file)
    assert read.metadata == METADATA
    assert read.tensors["a.weight"].shape == (2, 3)


@pytest.mark.parametrize("length", [3, 20, 60, 200, -1])
def test_a_file_that_was_cut_short_is_reported(file: Path, length: int):
    content = file.read_bytes()
    file.write_bytes(content[:length])
    with pytest.raises(UserError, match="is not a whole GGUF file") as error:
        read_gguf(file)
    assert str(file) in str(error.value)


def test_something_else_is_reported(tmp_path: Path):
    (tmp_path / "x.gguf").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00")
    with pytest.raises(UserError, match="git lfs pull"):
        read_gguf(tmp_path / "x.gguf")


def test_a_file_for_big_endian_machines_is_known_as_one(file: Path):
    content = bytearray(file.read_bytes())
    content[4:8] = (3).to_bytes(4, "big")
    file.write_bytes(bytes(content))
    with pytest.raises(UserError, match="its numbers are in big-endian order"):
        read_gguf(file)


def test_an_unknown_type_is_named(file: Path):
    content = bytearray(file.read_bytes())
    at = content.index(b"a.weight") + len(b"a.weight") + 4 + 16
    content[at : at + 4] = (99).to_bytes(4, "little")
    file.write_bytes(bytes(content))
    with pytest.raises(UserError, match=r"tensor 'a\.weight' has type 99"):
        read_gguf(file)


@pytest.mark.parametrize("alignment", [0, 3, 33, 2**31, -8, "32", 32.0, True, [32]])
def test_an_alignment_that_is_no_power_of_two_is_refused(tmp_path: Path, alignment):
    """llama.cpp refuses it as well: another one would read the tensors from elsewhere than they were written."""
    file = without_tensors(tmp_path / "m.gguf", METADATA | {"general.alignment": alignment})
    with pytest.raises(UserError, match=r"general\.alignment is"):
        read_gguf(file)


@pytest.mark.parametrize("count", ["2", 2.0, -1, [1], 2**40])
def test_a_number_of_parts_that_is_none_is_refused(tmp_path: Path, count):
    file = without_tensors(tmp_path / "m.gguf", METADATA | {"split.count": count})
    with pytest.raises(UserError, match=r"split\.count is|is one of the|metadata"):
        read_gguf(file)


def test_names_given_twice_overlaps_and_gaps_are_refused(file: Path):
    content, key = file.read_bytes(), b"llama.block_count"
    (file).write_bytes(content.replace(b"tokenizer.ggml.scores", b"tokenizer.ggml.tokens"))
    with pytest.raises(UserError, match=r"its metadata have 'tokenizer\.ggml\.tokens' twice"):
        read_gguf(file)
    file.write_bytes(content.replace(b"b.weight", b"a.weight"))
    with pytest.raises(UserError, match=r"the tensor 'a\.weight' twice"):
        read_gguf(file)
    assert key in content
    at = content.index(b"b.weight") + len(b"b.weight") + 4 + 8 + 4  # of the offset of the second tensor
    for offset in (0, 64, 2**63, 2**64 - 32):
        file.write_bytes(content[:at] + offset.to_bytes(8, "little") + content[at + 8 :] + bytes(200))
        with pytest.raises(UserError, match=r"starts at byte|ends at"):
            read_gguf(file)
    file.write_bytes(content[:at] + (33).to_bytes(8, "little") + content[at + 8 :])
    with pytest.raises(UserError, match="not a multiple of 32"):
        read_gguf(file)
